"""Asynchronous saves: consistent under training that goes on, one at a time, and their failures are told."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from holdfast.errors import CheckpointError, SaveError
from holdfast.run import atomic, manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import Checkpointer, Stager
from holdfast.trainer.checkpoint.dcp import ShardWriter
from holdfast.trainer.checkpoint.state import ObjectsState
from tests.builders.train_states import MakeState, copied, draw, held_writes, local_part, same, train
from tests.runs.processes import HANG_S

STEPS_MEANWHILE = 3


def no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def leftovers(run_dir: RunDir) -> list[str]:
    return [path.name for path in run_dir.checkpoints.iterdir() if path.name.startswith(atomic.TEMPORARY_PREFIX)]


def loaded(run_dir: RunDir, make_state: MakeState, step: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint; raises where its counters are not those of `step`."""
    state = make_state(seed=1, weights=False)
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.load(step)
    assert state.progress.step == step and state.progress.samples == 8 * step
    return copied(state.tensors())


STAGES: dict[str, Callable[[Stager, Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "staged": Stager.stage,
    "live tensors": lambda _, tensors: dict(tensors),
    "shallow copies": lambda _, tensors: {name: tensor.detach() for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_holds_the_state_of_its_call_whatever_training_does_meanwhile(
    stage: str, make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers update in place: without a real copy the checkpoint is torn, which this test would show."""
    monkeypatch.setattr(Stager, "stage", STAGES[stage])
    state = make_state(steps=2)
    saved = copied(state.tensors())
    with held_writes(monkeypatch) as held, Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(2)
        numbers = draw()
        assert held.begun.wait(HANG_S)
        train(state, STEPS_MEANWHILE)
        assert checkpointer.in_flight == 2 and checkpointer.poll() == [] and run_dir.committed_steps() == []
        held.release()
    found = loaded(run_dir, make_state, 2)
    assert draw() == numbers, "the generators are those of the call, too"
    assert same(found, saved) == (stage == "staged")
    if stage != "staged":
        assert same(found, copied(state.tensors())), "torn: tensors of a later step under the counters of this one"


def test_a_step_of_the_optimizer_waits_for_the_copy(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the optimizer changes the state, the copy is made beside the next gradients."""
    state = make_state(steps=2)
    released, stage, waits = threading.Event(), Stager.stage, threading.Event()

    def held_back(self: Stager, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert released.wait(HANG_S)
        return stage(self, tensors)

    monkeypatch.setattr(Stager, "stage", held_back)
    saved = copied(state.tensors())
    with Checkpointer(run_dir.checkpoints, state, updated_by=[state.optimizer]) as checkpointer:
        checkpointer.save(2)  # returns though nothing is copied yet

        def go_on() -> None:
            waits.set()
            train(state, 1)

        training = threading.Thread(target=go_on)
        training.start()
        assert waits.wait(HANG_S)
        training.join(0.3)
        assert training.is_alive() and same(copied(state.tensors()), saved), "the step waits"
        released.set()
        training.join(HANG_S)
        assert not training.is_alive() and not same(copied(state.tensors()), saved)
    assert same(loaded(run_dir, make_state, 2), saved)
    train(state, 1)  # a closed checkpointer holds nothing back


def test_a_copy_that_fails_fails_the_save_and_holds_no_step_back(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(steps=1)

    def out_of_memory(*_: object) -> dict[str, Tensor]:
        raise MemoryError("no room for a copy")

    checkpointer = Checkpointer(run_dir.checkpoints, state, updated_by=[state.optimizer])
    with monkeypatch.context() as patch:
        patch.setattr(Stager, "stage", out_of_memory)
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
        assert checkpointer.save(2) is True
        assert held.is_released, "it waited"
        train(state, 1)
    releasing.join()
    assert re.search(r"waited \d+\.\d s for the save before step 2", caplog.text)
    assert same(loaded(run_dir, make_state, 1), first), "the buffers were not filled again while they were written"
    assert same(loaded(run_dir, make_state, 2), second)


def test_a_save_is_left_out_by_policy_unless_it_is_urgent(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(steps=1)
    checkpointer = Checkpointer(run_dir.checkpoints, state, when_busy="skip")
    with held_writes(monkeypatch) as held:
        checkpointer.save(1)
        assert held.begun.wait(HANG_S)
        train(state, 1)
        assert checkpointer.save(2) is False
        assert "step 2 is not saved" in caplog.text
        train(state, 1)
        timer = threading.Timer(0.2, held.release)
        timer.start()
        assert checkpointer.save(3, urgent=True) is True
        assert held.is_released, "it waited"
        timer.join()
    checkpointer.wait()
    assert checkpointer.save(4) is True
    checkpointer.close()
    assert run_dir.committed_steps() == [1, 3, 4]


@pytest.mark.parametrize("surfaces_in", ["poll", "save", "close"])
def test_a_failure_surfaces_at_the_next_call(
    surfaces_in: str, make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(steps=1))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_manifest", no_space)
        checkpointer.save(1)  # does not raise
        checkpointer.wait()
    calls = {"poll": checkpointer.poll, "save": lambda: checkpointer.save(2), "close": checkpointer.close}
    with pytest.raises(SaveError, match=r"step 1 could not be saved .*No space left.* Those before it are whole"):
        calls[surfaces_in]()
    assert run_dir.committed_steps() == [] and leftovers(run_dir) == []
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

    def changed() -> None:
        model.append(torch.nn.Linear(2, 4))

    def widened() -> None:
        model[1] = torch.nn.Linear(2, 7)

    def narrowed() -> None:
        model.to(torch.bfloat16)

    def shrunk() -> None:
        model.pop(1)

    with Checkpointer(tmp_path, state) as checkpointer:
        for step, change in enumerate((lambda: None, changed, widened, narrowed, shrunk)):
            change()
            checkpointer.save(step)
            before = copied(state.tensors())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert checkpointer.load(step) == step
            assert same(copied(state.tensors()), before)
    assert len(plans) == 5


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
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
    assert checkpointer.save(2)
    checkpointer.close()
    assert run_dir.committed_steps() == [1, 2] and leftovers(run_dir) == []
    assert same(loaded(run_dir, make_state, 1), saved)


def test_state_that_cannot_be_saved_is_refused_at_the_call(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"counters": {"step": object()}}) as checkpointer:
        with pytest.raises(CheckpointError, match="counters.step is a object"):
            checkpointer.save(1)
        assert checkpointer.in_flight is None


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
    pointers: list[set[int]] = []
    write = ShardWriter.write

    def noted(writer: ShardWriter, tensors: Mapping[str, Tensor], directory: Path) -> Any:
        pointers.append(pointers_of(tensors))
        return write(writer, tensors, directory)

    monkeypatch.setattr(ShardWriter, "write", noted)
    state = make_state(steps=1)
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(1)
        train(state, 1)
        checkpointer.save(2)
        train(state, 1)
        saved = copied(state.tensors())
        checkpointer.save(3)
        train(state, 1)
    assert plans == [1]
    assert pointers[0] == pointers[1] == pointers[2] and len(pointers[0]) > 20
    assert not pointers[0] & pointers_of(state.tensors())
    assert same(loaded(run_dir, make_state, 3), saved)


def pointers_of(tensors: Mapping[str, Tensor]) -> set[int]:
    return {local_part(tensor).data_ptr() for tensor in tensors.values()}
