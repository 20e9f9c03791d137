"""Saves that fail at any stage: nothing of them is visible, the steps before are whole, the next try succeeds."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from holdfast.errors import CheckpointError, RankLost, SaveError
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import ORCHESTRATOR_DIR, TRAINER_DIR, Retention
from holdfast.run.journal import STATE_NAME
from holdfast.run.run_dir import RunDir
from holdfast.trainer import mesh
from holdfast.trainer.checkpoint import commit, dcp
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from tests.builders.train_states import MakeState, NotifyingStorage, train

both = pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fails_for(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """As `original`, but fails for paths that end with `name`."""

    def maybe(path: Any, *args: Any, **options: Any) -> Any:
        return fails() if str(path).endswith(name) else original(path, *args, **options)

    return maybe


def half_written(write: Callable[..., int]) -> Callable[..., int]:
    """As `os.write` on a disk that has room for 64 KiB of each call's first 4 KiB more."""
    left = [20_000]

    def some(descriptor: int, data: Any) -> int:
        size = min(len(data), left[0])
        left[0] -= size
        return write(descriptor, data[:size]) if size else fails() or 0

    return some


def broken_fsync(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "making the directory": lambda patch: patch.setattr(atomic, "make_directory", fails),
    "opening a shard": lambda patch: patch.setattr(dcp.os, "open", fails_for(".distcp", os.open)),
    "writing a shard": lambda patch: patch.setattr(dcp.os, "write", half_written(os.write)),
    "fsync of a shard": lambda patch: patch.setattr(os, "fsync", broken_fsync),
    "writing the index": lambda patch: patch.setattr(FileSystemWriter, "finish", fails),
    "writing generators": lambda patch: patch.setattr(
        Path, "write_bytes", fails_for("random_rank_0.json", Path.write_bytes)
    ),
    "writing counters": lambda patch: patch.setattr(Path, "write_bytes", fails_for("progress.json", Path.write_bytes)),
    "checksums": lambda patch: patch.setattr(manifest, "describe_files", fails),
    "flushing": lambda patch: patch.setattr(atomic, "fsync_tree", fails),
    "writing the manifest": lambda patch: patch.setattr(manifest, "write_manifest", fails),
    "renaming": lambda patch: patch.setattr(atomic, "publish_directory", fails),
}


@both
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_leaves_nothing_and_the_old_steps_alone(
    fault: str, save_async: bool, make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(steps=1)
    checkpointer = Checkpointer(run_dir.checkpoints, state, save_async=save_async, retention=Retention(keep=1))
    attachments = {f"{ORCHESTRATOR_DIR}/{STATE_NAME}": b"{}"}
    checkpointer.save(1, attachments=attachments)
    checkpointer.wait()
    train(state, 1)
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises(SaveError, match=r"step 2 could not be saved.*: (No space left|Input/output error)"):
            checkpointer.save(2, attachments=attachments)  # a synchronous save raises itself
            checkpointer.wait()
            checkpointer.poll()
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_1"]
    manifest.verify(run_dir.checkpoint(1))
    checkpointer.save(2, attachments=attachments)  # and the next try is not in its way
    checkpointer.close()
    assert run_dir.committed_steps() == [2]
    manifest.verify(run_dir.checkpoint(2))
    resumed = make_state()
    with Checkpointer(run_dir.checkpoints, resumed) as loading:
        loading.load(2)
    assert resumed.progress.step == 2


def test_a_full_disk_is_named_with_the_file(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself reports it as "unexpected pos"."""
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(steps=1), save_async=False)
    with monkeypatch.context() as patch:
        patch.setattr(dcp.os, "write", half_written(os.write))
        with pytest.raises(SaveError, match=r"No space left on device: .*__0_0\.distcp"):
            checkpointer.save(1)


def test_tensors_that_a_writer_loses_fail_the_save(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch swallows an I/O error in a writer thread and reports success with items missing."""
    whole = FileSystemWriter.write_data

    def lossy(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        future = whole(self, plan, planner)
        future.value().pop()
        return future

    monkeypatch.setattr(FileSystemWriter, "write_data", lossy)
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(steps=1))
    checkpointer.save(1)
    with pytest.raises(SaveError, match="1 of .* tensors were not written"):
        checkpointer.close()
    assert run_dir.committed_steps() == []


def test_a_shard_that_is_shorter_than_what_was_written_fails_the_save(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FileSystemWriter.finish

    def cutting(self: FileSystemWriter, *args: Any) -> None:
        finish(self, *args)
        shard = run_dir.checkpoints / ".tmp-step_1" / TRAINER_DIR / "__0_0.distcp"
        os.truncate(shard, shard.stat().st_size - 1)

    monkeypatch.setattr(FileSystemWriter, "finish", cutting)
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(steps=1))
    checkpointer.save(1)
    with pytest.raises(SaveError, match=r"__0_0\.distcp has \d+ bytes, \d+ were written"):
        checkpointer.close()
    assert run_dir.committed_steps() == []


@both
@pytest.mark.parametrize("what", ["removing", "telling"])
def test_what_fails_after_the_commit_does_not_undo_it(
    what: str, save_async: bool, make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    told: list[Path] = []

    def tell(directory: Path) -> None:
        told.append(directory)
        if what == "telling":
            raise OSError(errno.EIO, "Input/output error")

    if what == "removing":
        monkeypatch.setattr(atomic, "remove_directory", fails)
    checkpointer = Checkpointer(
        run_dir.checkpoints,
        make_state(),
        save_async=save_async,
        retention=Retention(keep=1),
        storage=NotifyingStorage(tell),
    )
    committed: list[int] = []
    for step in (0, 1):
        checkpointer.save(step)
        checkpointer.wait()
        committed += checkpointer.poll()
    checkpointer.close()
    assert committed == [0, 1] and told == [run_dir.checkpoint(0), run_dir.checkpoint(1)]
    assert any(record.levelno == logging.ERROR and "is saved, but" in record.message for record in caplog.records)
    manifest.verify(run_dir.checkpoint(1))


def test_leftovers_of_a_killed_save_are_replaced(make_state: MakeState, run_dir: RunDir) -> None:
    torn = run_dir.checkpoints / ".tmp-step_1" / TRAINER_DIR
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"half")
    (torn / "__1_0.distcp").write_bytes(b"of another number of ranks")
    with Checkpointer(run_dir.checkpoints, make_state(steps=1)) as checkpointer:
        checkpointer.save(1)
    assert "trainer/__1_0.distcp" not in manifest.verify(run_dir.checkpoint(1)).files
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_1"]


def test_what_a_save_before_has_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    left = tmp_path / "step_1"
    left.mkdir()
    (left / "torn").touch()
    commit._make_empty(left)
    assert [path.name for path in left.rglob("*")] == [TRAINER_DIR]


def test_counters_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for content in (None, b"{"):
        if content is not None:
            (tmp_path / "progress.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/progress.json cannot be read"):
            commit.read_values(tmp_path)


def test_a_collective_that_fails_says_what_that_means() -> None:
    said = "another rank of the trainer ended or cannot be reached: Connection closed$"
    with pytest.raises(RankLost, match=said), mesh._naming_lost_ranks():
        raise RuntimeError("Connection closed\nby peer")
