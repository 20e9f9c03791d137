"""A file that cannot be read is no damage: nothing is passed over, moved aside, made again or replaced for it."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from holdfast.commands.ckpt import ls
from holdfast.commands.ckpt import verify as ckpt_verify
from holdfast.config import SftConfig
from holdfast.errors import ReadError, RunDirError, is_storage_failure
from holdfast.launcher.resume.prepare import prepare
from holdfast.launcher.resume.remote import fetch
from holdfast.launcher.resume.resume_step import resolve_resume_step, set_aside_damaged
from holdfast.orchestrator.batch_pipeline import version_for
from holdfast.orchestrator.main import find_start
from holdfast.orchestrator.state import OrchestratorState
from holdfast.protocol.rollouts import Batch
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run import atomic, journal
from holdfast.run.journal import read_accepted
from holdfast.run.manifest import MANIFEST_NAME, is_committed, read_manifest, verify
from holdfast.run.run_dir import RunDir
from holdfast.view.ckpt_dirs import CheckpointDirs
from holdfast.view.follow import Tail
from tests.builders.broken_storage import unreadable
from tests.builders.checkpoint_files import contents, write_checkpoint, write_weights


@pytest.fixture
def three(run_dir: RunDir) -> RunDir:
    for step in (10, 20, 30):
        write_checkpoint(run_dir, step, run_id=run_dir.run_id())
    return run_dir


def test_an_error_of_reading_keeps_its_cause(three: RunDir) -> None:
    path = three.checkpoint(30) / MANIFEST_NAME
    with unreadable(path):
        for read in (read_manifest, is_committed, verify):
            with pytest.raises(ReadError, match=f"{path} cannot be read: Input/output error") as caught:
                read(three.checkpoint(30))
            assert is_storage_failure(caught.value)
        with pytest.raises(ReadError):
            read_accepted(path, step=3)
    assert verify(three.checkpoint(30)).step == 30


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ETIMEDOUT, errno.ENOTCONN])
def test_no_older_step_stands_for_one_unreadable(three: RunDir, number: int, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as faulty:
        faulty.setattr("holdfast.run.manifest.file_digest", fail)
        for wanted in ("auto", "latest", 30):
            with pytest.raises(ReadError) as caught:
                resolve_resume_step(three, wanted)
            assert is_storage_failure(caught.value)
    assert resolve_resume_step(three, "auto") == 30


def test_an_older_step_can_still_be_asked_for_by_number(three: RunDir) -> None:
    with unreadable(three.checkpoint(30) / MANIFEST_NAME):
        with pytest.raises(ReadError, match=r"choose one by number: 10, 20\.$"):
            resolve_resume_step(three, "auto")
        assert resolve_resume_step(three, 20) == 20
        with pytest.raises(ReadError):
            three.committed_steps()
        assert set_aside_damaged(three, 2) == []
    assert three.committed_steps() == [10, 20, 30]


def test_commands_name_what_is_unreadable(three: RunDir) -> None:
    places = CheckpointDirs(three.path)
    with unreadable(three.checkpoint(10) / MANIFEST_NAME):
        (problem,) = ls(places, steps=[], metric=None).problems
        assert problem.startswith("step 10 is unreadable: ")
        (problem,) = ckpt_verify(places, steps=[], how="full").problems
        assert "cannot be read: Input/output error" in problem
    shard = three.checkpoint(10) / "trainer/__0.distcp"
    shard.rename(shard.with_name("kept"))
    shard.symlink_to(shard)
    (problem,) = ls(places, steps=[], metric=None).problems
    assert problem.startswith("step 10 is unreadable: ") and "__0.distcp cannot be read: Too many levels of" in problem


def test_batches_and_weights_that_cannot_be_read_are_not_replaced(run_dir: RunDir) -> None:
    write_weights(run_dir, 3)
    with unreadable(run_dir.weights_of(3) / MANIFEST_NAME), pytest.raises(ReadError):
        version_for(5, run_dir, async_level=1, trainer_step=4)
    assert version_for(5, run_dir, async_level=1, trainer_step=4) == 3
    state = msgspec.structs.replace(OrchestratorState(), step=1)
    batch = Batch(step=1, policy_version=0, weights_digest="", rollouts=[])
    directory = journal.publish_batch(run_dir, batch, state.encode())
    with unreadable(directory / MANIFEST_NAME), pytest.raises(ReadError) as caught:
        find_start(run_dir, None)
    assert is_storage_failure(caught.value) and find_start(run_dir, None)[1].step == 1


def test_the_console_waits_for_lines_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"phase": "a"}\n')
    tail = Tail(path)
    with unreadable(path):
        assert list(tail) == []
    assert [event["phase"] for event in tail] == ["a"]
    with pytest.raises(IsADirectoryError):
        list(Tail(tmp_path))


@pytest.fixture
def store(three: RunDir, tmp_path: Path) -> str:
    url = f"file://{tmp_path}/store"
    for step in three.committed_steps():
        RemoteCheckpoints(url).upload(three.checkpoint(step), step)
    return url


def test_a_full_disk_here_is_no_fault_of_stores(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = RunDir(tmp_path / "scratch")
    write_checkpoint(here, 10, run_id=RemoteCheckpoints(store).read_manifest(30).run_id)
    for name in ("make_directory", "publish_directory"):

        def fail(*paths: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(paths[0]))

        with monkeypatch.context() as full:
            full.setattr(atomic, name, fail)
            with pytest.raises(RunDirError, match=r"step_30 cannot be written: .*No space left") as caught:
                fetch(store, here, "auto")
        assert is_storage_failure(caught.value) and here.committed_steps() == [10]
    assert RemoteCheckpoints(store).steps() == [10, 20, 30] and fetch(store, here, "auto") == 30


def test_a_checkpoint_here_that_cannot_be_read_is_not_replaced_by_that_of_the_store(store: str, three: RunDir) -> None:
    before = contents(three.checkpoint(30))
    for wanted in ("auto", 30):
        with unreadable(three.checkpoint(30) / MANIFEST_NAME), pytest.raises(ReadError):
            fetch(store, three, wanted)
    assert contents(three.checkpoint(30)) == before


def test_a_damaged_checkpoint_that_the_store_has_is_set_aside(store: str, three: RunDir) -> None:
    shard = three.checkpoint(30) / "trainer/__0.distcp"
    shard.write_bytes(b"damaged")
    assert fetch(store, three, "auto") == 30 and verify(three.checkpoint(30)).step == 30
    assert (three.discarded(1) / "checkpoints/step_30/trainer/__0.distcp").read_bytes() == b"damaged"


@pytest.mark.parametrize("name", ["checkpoints", "weights", "rollouts"])
def test_a_link_to_a_disk_that_is_away_is_not_an_empty_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(tmp_path / "disk")
    config = SftConfig.model_validate({"output_dir": tmp_path, "max_steps": 5, "ckpt": {"resume_step": "auto"}})
    with pytest.raises(ReadError, match=rf"{name} is a link to .*disk, which is away"):
        prepare(config, clean=False, dry_run=False)
    (tmp_path / "disk").mkdir()
    assert prepare(config, clean=False, dry_run=True).resume_step is None
