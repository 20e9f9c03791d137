"""Saves: consistent under training that goes on, one at a time; what fails is told and leaves the rest alone."""

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from holdfast.errors import CheckpointError, RankLost, SaveError
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import ORCHESTRATOR_DIR, TRAINER_DIR, Retention
from holdfast.run.journal import STATE_NAME
from holdfast.run.run_dir import RunDir
from holdfast.trainer import mesh
from holdfast.trainer.checkpoint import commit, dcp
from holdfast.trainer.checkpoint.checkpointer import Checkpointer, Stager
from holdfast.trainer.checkpoint.commit import Identity
from holdfast.trainer.checkpoint.dcp import ShardWriter
from holdfast.trainer.checkpoint.state import ObjectsState
from tests.builders.train_states import MakeState, NotifyingStorage, copied, draw, held_writes, local_part, same, train
from tests.runs.processes import HANG_S


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


fails = raising(OSError(errno.ENOSPC, "No space left on device"))
both = pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])


def loaded(run_dir: RunDir, make_state: MakeState, step: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint; raises where its counters are not those of `step`."""
    state = make_state(seed=1, weights=False)
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.load(step)
    assert state.progress.step == step and state.progress.samples == 8 * step
    return copied(state.tensors())


def test_a_save_holds_the_state_of_its_call_whatever_training_does_meanwhile(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers update in place: without a real copy the checkpoint is torn."""
    state = make_state(steps=2)
    saved = copied(state.tensors())
    with held_writes(monkeypatch) as held, Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(2)
        numbers = draw()
        assert held.begun.wait(HANG_S)
        train(state, 3)
        assert checkpointer.in_flight == 2 and checkpointer.poll() == [] and run_dir.committed_steps() == []
        held.release()
    found = loaded(run_dir, make_state, 2)
    assert draw() == numbers, "the generators are those of the call, too"
    assert same(found, saved) and not same(found, copied(state.tensors()))


def test_a_step_waits_for_the_copy(make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the optimizer changes the state, the copy is made beside the next gradients."""
    state = make_state(steps=2)
    released, stage, waits = threading.Event(), Stager.stage, threading.Event()
    monkeypatch.setattr(Stager, "stage", lambda *given: released.wait(HANG_S) and stage(*given))
    saved = copied(state.tensors())
    with Checkpointer(run_dir.checkpoints, state, updated_by=[state.optimizer]) as checkpointer:
        checkpointer.save(2)  # returns though nothing is copied yet
        training = threading.Thread(target=lambda: waits.set() or train(state, 1))
        training.start()
        assert waits.wait(HANG_S)
        training.join(0.3)
        assert training.is_alive() and same(copied(state.tensors()), saved), "the step waits"
        released.set()
        training.join(HANG_S)
        assert not training.is_alive() and not same(copied(state.tensors()), saved)
    assert same(loaded(run_dir, make_state, 2), saved)
    train(state, 1)  # a closed checkpointer holds nothing back


def test_a_failed_copy_fails_the_save(make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(steps=1)
    checkpointer = Checkpointer(run_dir.checkpoints, state, updated_by=[state.optimizer])
    with monkeypatch.context() as patch:
        patch.setattr(Stager, "stage", raising(MemoryError("no room for a copy")))
        checkpointer.save(1)
        train(state, 1)
    with pytest.raises(SaveError, match="MemoryError: no room for a copy"):
        checkpointer.close()
    assert run_dir.committed_steps() == []


def test_the_second_save_waits_for_the_first_and_says_so(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(steps=1)
    first = copied(state.tensors())
    with held_writes(monkeypatch) as held, Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(1)
        assert held.begun.wait(HANG_S)
        train(state, 1)
        second = copied(state.tensors())
        waits, wait = threading.Event(), checkpointer.wait
        monkeypatch.setattr(checkpointer, "wait", lambda: waits.set() or wait())
        releasing = threading.Thread(target=lambda: waits.wait(HANG_S) and held.release())
        releasing.start()
        checkpointer.save(2)
        assert held.is_released, "it waited"
        train(state, 1)
    releasing.join()
    assert re.search(r"waited \d+\.\d s for the save before step 2", caplog.text)
    assert same(loaded(run_dir, make_state, 1), first), "the buffers were not filled again while they were written"
    assert same(loaded(run_dir, make_state, 2), second)


@pytest.mark.parametrize("surfaces_in", ["poll", "save", "close"])
def test_a_failure_surfaces_at_the_next_call(
    surfaces_in: str, make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(steps=1))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_manifest", fails)
        checkpointer.save(1)  # does not raise
        checkpointer.wait()
    calls = {"poll": checkpointer.poll, "save": lambda: checkpointer.save(2), "close": checkpointer.close}
    with pytest.raises(SaveError, match=r"step 1 could not be saved .*No space left.* Those before it are whole"):
        calls[surfaces_in]()
    assert not list(run_dir.checkpoints.iterdir())
    if surfaces_in != "close":
        checkpointer.save(2)
        checkpointer.close()  # told once, and a later save has made good for it
        assert run_dir.committed_steps() == [2]


def test_what_was_being_written_when_a_loop_fails_is_committed(make_state: MakeState, run_dir: RunDir) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(run_dir.checkpoints, make_state()) as checkpointer:
        checkpointer.save(0)
        _ = 1 / 0
    assert run_dir.committed_steps() == [0]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of every plan that is made."""
    found: list[int] = []
    make_plan = DefaultSavePlanner.create_global_plan

    def counted(planner: DefaultSavePlanner, all_plans: Any) -> Any:
        found.append(len(all_plans))
        return make_plan(planner, all_plans)

    monkeypatch.setattr(DefaultSavePlanner, "create_global_plan", counted)
    return found


def test_other_tensors_are_planned_again(tmp_path: Path, plans: list[int]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    state = ObjectsState({"model": model})
    changes = (
        lambda: None,
        lambda: model.append(torch.nn.Linear(2, 4)),
        lambda: model.__setitem__(1, torch.nn.Linear(2, 7)),  # wider
        lambda: model.to(torch.bfloat16),
        lambda: model.pop(1),
    )
    with Checkpointer(tmp_path, state) as checkpointer:
        for step, change in enumerate(changes):
            change()
            checkpointer.save(step)
            before = copied(state.tensors())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert checkpointer.load(step) == step and same(copied(state.tensors()), before)
    assert len(plans) == 5


def test_a_step_of_another_run_is_named_passed_over_and_not_written_over(
    make_state: MakeState, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(steps=1)
    for name, steps in (("mine", [1]), ("other", [2])):
        with Checkpointer(run_dir.checkpoints, state, identity=Identity(name)) as checkpointer:
            for step in steps:
                checkpointer.save(step)
    mine = Checkpointer(run_dir.checkpoints, state, save_async=False, identity=Identity("mine", run_ids=["mine"]))
    assert mine.load("latest") == 1
    assert "skipping step 2: " in caplog.text and "step_2 is a checkpoint of another run (other)" in caplog.text
    with pytest.raises(SaveError, match=r"step_2 is a checkpoint of another run \(other\).* Move it away"):
        mine.save(2)


@both
def test_a_step_that_exists_is_not_written_over(make_state: MakeState, run_dir: RunDir, save_async: bool) -> None:
    """As when a loop saves the step that it was resumed from."""
    state = make_state(steps=1)
    saved = copied(state.tensors())
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(1)
    checkpointer = Checkpointer(run_dir.checkpoints, state, save_async=save_async)
    checkpointer.load(1)
    train(state, 1)
    with pytest.raises(SaveError, match="step_1 exists already, and checkpoints are never written over"):
        checkpointer.save(1)
        checkpointer.wait()
        checkpointer.poll()
    checkpointer.save(2)
    checkpointer.close()
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_1", "step_2"]
    assert same(loaded(run_dir, make_state, 1), saved)


def test_state_that_cannot_be_saved_is_refused_at_the_call_and_counters_that_cannot_be_read(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"counters": {"step": object()}}) as checkpointer:
        with pytest.raises(CheckpointError, match="counters.step is a object"):
            checkpointer.save(1)
        assert checkpointer.in_flight is None
    for _ in range(2):  # first they are missing
        with pytest.raises(CheckpointError, match=f"{tmp_path}/progress.json cannot be read"):
            commit.read_values(tmp_path)
        (tmp_path / "progress.json").write_bytes(b"{")


def test_a_save_leaves_the_gpus_alone(make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes would open a context on the first GPU, for every rank: its current one is no other."""

    def touched(*_: object) -> None:
        raise AssertionError(f"CUDA was touched by {threading.current_thread().name}")

    state = make_state(steps=1)
    # As on a machine with GPUs, of which torch's own writer of checkpoints asks for a stream.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", touched)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        assert checkpointer.poll() == [1]


def test_buffers_are_reused_and_no_second_plan_is_made(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, plans: list[int]
) -> None:
    def pointers_of(tensors: Mapping[str, Tensor]) -> set[int]:
        return {local_part(tensor).data_ptr() for tensor in tensors.values()}

    pointers: list[set[int]] = []
    write = ShardWriter.write

    def noted(writer: ShardWriter, tensors: Mapping[str, Tensor], directory: Path) -> Any:
        pointers.append(pointers_of(tensors))
        return write(writer, tensors, directory)

    monkeypatch.setattr(ShardWriter, "write", noted)
    state = make_state()
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        for step in (1, 2, 3):
            train(state, 1)
            saved = copied(state.tensors())
            checkpointer.save(step)
        train(state, 1)
    assert plans == [1]
    assert pointers[0] == pointers[1] == pointers[2] and len(pointers[0]) > 20
    assert not pointers[0] & pointers_of(state.tensors()) and same(loaded(run_dir, make_state, 3), saved)


def half_written(write: Callable[..., int]) -> Callable[..., int]:
    """As `os.write` on a disk that has room for 64 KiB of each call's first 4 KiB more."""
    left = [20_000]

    def some(descriptor: int, data: Any) -> int:
        size = min(len(data), left[0])
        left[0] -= size
        return write(descriptor, data[:size]) if size else fails() or 0

    return some


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "writing a shard": lambda patch: patch.setattr(dcp.os, "write", half_written(os.write)),
    "fsync of a shard": lambda patch: patch.setattr(os, "fsync", raising(OSError(errno.EIO, "Input/output error"))),
    "checksums": lambda patch: patch.setattr(manifest, "describe_files", fails),
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
        with pytest.raises(SaveError, match=r"step 2 could not be saved.*: (No space left|Input/output error)") as told:
            checkpointer.save(2, attachments=attachments)  # a synchronous save raises itself
            checkpointer.wait()
            checkpointer.poll()
    if fault == "writing a shard":  # where torch itself would say "unexpected pos"
        assert re.search(r"No space left on device: .*__0_0\.distcp", str(told.value))
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_1"]
    manifest.verify(run_dir.checkpoint(1))
    checkpointer.save(2, attachments=attachments)  # and the next try is not in its way
    checkpointer.close()
    assert run_dir.committed_steps() == [2] and same(loaded(run_dir, make_state, 2), copied(state.tensors()))


def losing_a_tensor(writer: FileSystemWriter, whole: Callable[..., Any], *given: Any) -> Any:
    """As torch, which swallows an I/O error in a writer thread and reports success with items missing."""
    future = whole(writer, *given)
    future.value().pop()
    return future


def cutting_a_shard(writer: FileSystemWriter, whole: Callable[..., Any], *given: Any) -> None:
    whole(writer, *given)
    shard = Path(writer.path) / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)


def test_lost_and_cut_data_fail_saves(make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, (method, fault, said) in enumerate(
        (
            ("write_data", losing_a_tensor, "1 of .* tensors were not written"),
            ("finish", cutting_a_shard, r"__0_0\.distcp has \d+ bytes, \d+ were written"),
        )
    ):
        checkpointer = Checkpointer(run_dir.checkpoints, make_state(steps=1))
        with monkeypatch.context() as patch:
            patch.setattr(FileSystemWriter, method, partialmethod(fault, getattr(FileSystemWriter, method)))
            checkpointer.save(step)
            with pytest.raises(SaveError, match=said):
                checkpointer.close()
        assert run_dir.committed_steps() == []


@both
@pytest.mark.parametrize("what", ["removing", "telling"])
def test_what_fails_after_the_commit_does_not_undo_it(
    what: str, save_async: bool, make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    told: list[Path] = []
    storage = NotifyingStorage(lambda directory: told.append(directory) or (what == "telling" and fails()))
    if what == "removing":
        monkeypatch.setattr(atomic, "remove_directory", fails)
    options = {"save_async": save_async, "retention": Retention(keep=1), "storage": storage}
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(), **options)
    committed: list[int] = []
    for step in (0, 1):
        checkpointer.save(step)
        checkpointer.wait()
        committed += checkpointer.poll()
    checkpointer.close()
    assert committed == [0, 1] and told == [run_dir.checkpoint(0), run_dir.checkpoint(1)]
    assert any(record.levelno == logging.ERROR and "is saved, but" in record.message for record in caplog.records)
    manifest.verify(run_dir.checkpoint(1))


def test_leftovers_of_a_killed_save_are_replaced(make_state: MakeState, run_dir: RunDir, tmp_path: Path) -> None:
    torn = run_dir.checkpoints / ".tmp-step_1" / TRAINER_DIR
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"half")
    (torn / "__1_0.distcp").write_bytes(b"of another number of ranks")
    with Checkpointer(run_dir.checkpoints, make_state(steps=1)) as checkpointer:
        checkpointer.save(1)
    assert "trainer/__1_0.distcp" not in manifest.verify(run_dir.checkpoint(1)).files
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_1"]
    left = tmp_path / "step_1"
    left.mkdir()
    (left / "torn").touch()
    commit._make_empty(left)
    assert [path.name for path in left.rglob("*")] == [TRAINER_DIR]


def test_a_collective_that_fails_says_what_that_means() -> None:
    said = "another rank of the trainer ended or cannot be reached: Connection closed$"
    with pytest.raises(RankLost, match=said), mesh._naming_lost_ranks():
        raise RuntimeError("Connection closed\nby peer")
