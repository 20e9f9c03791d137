"""A hook as a user writes it. It counts its calls in its state, and its arguments name calls at which it does more."""

import os
import signal
from pathlib import Path
from typing import Any

from holdfast import Hook, HookReply, StepView


class Counting(Hook):
    """Writes each call into `calls.txt` of the run. Calls are named METHOD:STEP. Each of them kills something, or
    fails, only while the directory of the run has no file of that name."""

    def __init__(self, *, save: str = "", stop: str = "", fail: str = "", kill: str = "", own_kill: str = "") -> None:
        self._save, self._stop, self._fail, self._kill, self._own_kill = save, stop, fail, kill, own_kill
        self._calls = 0
        self._losses: list[float] = []

    def _called(self, method: str, view: StepView) -> HookReply:
        name = f"{method}:{view.step}"
        self._calls += 1
        self._losses.append(view.metrics["loss"])
        with (view.run / "calls.txt").open("a") as calls:
            print(name, self._calls, view.metrics["loss"], view.checkpoint and view.checkpoint.name, file=calls)
        if name == self._fail and _first(view.run, name):
            raise ValueError("out of order")
        if name in self._kill.split() and _first(view.run, name):
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        if name == self._own_kill and _first(view.run, name):
            os.kill(os.getpid(), signal.SIGKILL)
        if method == "after_save":
            return HookReply(stop="it is far enough" if name == self._stop else "")
        metrics = {f"{method}_calls": self._calls, "loss_sum": sum(self._losses)}
        return HookReply(metrics, save=name == self._save, stop="it is far enough" if name == self._stop else "")

    def after_step(self, view: StepView) -> HookReply:
        return self._called("after_step", view)

    def after_evaluation(self, view: StepView) -> HookReply:
        return self._called("after_evaluation", view)

    def after_save(self, view: StepView) -> HookReply:
        assert view.checkpoint is not None and (view.checkpoint / "manifest.json").exists()
        return self._called("after_save", view)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "losses": self._losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls, self._losses = state["calls"], state["losses"]


def _first(run: Path, name: str) -> bool:
    path = run / f"was_{name}"
    is_first = not path.exists()
    path.touch()
    return is_first


class Steps(Hook):
    """Counts steps."""

    _number = 0

    def after_step(self, view: StepView) -> None:
        self._number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._number = state["number"]


class Tuples(Hook):
    """Its state does not come back from JSON as it was."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": (1, 2)}


class Plain:
    """Is no hook."""
