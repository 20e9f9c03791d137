"""A process that is killed at any call of a save leaves the checkpoint before the save, or the new one, whole. Which
steps of a run are lost, `test_kill_during_save` asks a whole run."""

import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from holdfast.run.checkpoints import Retention
from holdfast.run.manifest import verify
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from tests.faults.faulty_calls import deaths, in_faulty_child, read_trail


class Training:
    """A model and its optimizer, saved by `Checkpointer`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def checkpointer(self, output: Path, *, save_async: bool) -> Checkpointer:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return Checkpointer(RunDir(output).checkpoints, parts, save_async=save_async, retention=Retention(keep=1))

    def bits(self) -> list[bytes]:
        tensors = [*self.model.parameters(), *(one["exp_avg"] for one in self.optimizer.state.values())]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]


def _save(training: Training, output: Path, *, save_async: bool, **fault: object) -> int:
    """Save step 2 in a process of its own; return its exit code, a signal as a negative number."""

    def save() -> None:
        with training.checkpointer(output, save_async=save_async) as checkpointer:
            checkpointer.save(2)

    return in_faulty_child(save, output, **fault)


@pytest.mark.parametrize("save_async", [False, True])
def test_killed_at_any_call_of_a_save_the_old_step_or_the_new_one_is_whole(save_async: bool, tmp_path: Path) -> None:
    training, bits = Training(), {}
    before = tmp_path / "before"
    RunDir(before).create()
    training.step()
    with training.checkpointer(before, save_async=False) as checkpointer:
        checkpointer.save(1)
    bits[1] = training.bits()
    training.step()
    bits[2] = training.bits()
    assert bits[1] != bits[2]
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(before, undisturbed)
    assert _save(training, undisturbed, save_async=save_async) == 0
    assert RunDir(undisturbed).committed_steps() == [2], "the step before is removed by the same save"
    calls = read_trail(undisturbed.with_suffix(".trail"))
    kinds = Counter(call.name for call in calls)
    assert kinds["rename"] >= 2 and kinds["fsync"] and kinds["open"] and kinds["mkdir"] and kinds["unlink"], kinds
    left = Counter[int]()
    for place, (number, instant) in enumerate(deaths(calls, halves=True)):
        output = tmp_path / f"death {place}"
        shutil.copytree(before, output)
        code = _save(training, output, save_async=save_async, kill_at=number, instant=instant)
        assert code == -signal.SIGKILL, (number, instant)
        run_dir = RunDir(output)
        run_dir.clear_leftovers()
        steps = run_dir.committed_steps()
        assert steps and set(steps) <= {1, 2}, (calls[number - 1], steps)
        for step in steps:
            verify(run_dir.checkpoint(step), how="full", step=step)
        again = Training()
        with again.checkpointer(output, save_async=False) as checkpointer:
            checkpointer.load(steps[-1])
            assert again.bits() == bits[steps[-1]], (calls[number - 1], instant)
            left[steps[-1]] += 1
            checkpointer.save(3)
        # Retention spares the step that was loaded.
        assert run_dir.committed_steps() == [steps[-1], 3], "a save after the death is as any other"
        assert not [path.name for path in run_dir.checkpoints.iterdir() if path.name.startswith(".tmp-")]
        shutil.rmtree(output)
    assert left[1] >= 5 and left[2] >= 3, left
