"""Where committed steps are kept: here alone, or in an object store besides, for any loop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import CheckpointError
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run import atomic
from holdfast.run.checkpoints import Retention
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.storage import ObjectStorage
from tests.builders.checkpoint_files import write_checkpoint, write_weights
from tests.builders.train_states import NotifyingStorage
from tests.runs.processes import HANG_S


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_a_loop_of_ones_own_keeps_its_steps_in_a_store(tmp_path: Path) -> None:
    storage = ObjectStorage(f"file://{tmp_path / 'there'}", retention=Retention(keep=2))
    with Checkpointer(tmp_path / "here", {"progress": {"step": 0}}, storage=storage) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    storage.close(HANG_S)
    assert RemoteCheckpoints(f"file://{tmp_path / 'there'}").steps() == [2, 3]


def test_a_step_takes_the_weights_along_that_a_resume_needs(tmp_path: Path, run_dir: RunDir) -> None:
    storage = ObjectStorage(f"file://{tmp_path / 'there'}", older_weights=2, weights_of=run_dir.weights_of)
    for version in (0, 3, 4):
        write_weights(run_dir, version)
    storage.publish(write_checkpoint(run_dir, 4))
    storage.close(HANG_S)
    there = RemoteCheckpoints(f"file://{tmp_path / 'there'}")
    assert there.steps() == [4]
    found = [version for version in range(6) if there.download_weights(version, tmp_path / f"weights_{version}")]
    assert found == [3], "of the two before it, version 2 was never published"


def test_what_a_store_has_refused_is_told_once(tmp_path: Path, run_dir: RunDir) -> None:
    storage = ObjectStorage(f"file://{tmp_path / 'there'}")
    directory = write_checkpoint(run_dir, 1)
    file = next(path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json")
    file.write_bytes(file.read_bytes() + b"x")
    storage.publish(directory)
    with pytest.raises(CheckpointError, match="is damaged"):
        storage.close(HANG_S)
    storage.poll()


def test_what_is_to_follow_a_commit_follows_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    remove = atomic.remove_directory
    monkeypatch.setattr(atomic, "remove_directory", lambda path: (happened.append(f"- {path.name}"), remove(path)))
    checkpointer = Checkpointer(
        tmp_path,
        {"counter": {"step": 0}},
        save_async=False,
        retention=Retention(keep=1),
        storage=NotifyingStorage(lambda path: happened.append(f"+ {path.name}")),
    )
    with checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    assert happened == ["+ step_1", "+ step_2", "- step_1"]


def test_what_a_step_needs_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, publish = os.fsync, atomic.publish_directory

    def noted(descriptor: int) -> None:
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def published(temporary: Path, final: Path) -> None:
        happened.append("published")
        publish(temporary, final)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(atomic, "publish_directory", published)
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write(1, {"loss": 0.5})
    state = {"counter": {"step": 1}}
    with Checkpointer(tmp_path / "checkpoints", state, save_async=False, before_commit=metrics.flush) as checkpointer:
        checkpointer.save(1)
    before = happened[: happened.index("published")]
    assert "metrics.jsonl" in before and "random_rank_0.json" in before, before
    metrics.close()
