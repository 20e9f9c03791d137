"""Hooks of the user in a training program: rank 0 calls their process, and all ranks get what they ask for.

A step is called with the states of the step before. States are in checkpoints, so a step that is trained again after a
kill is called again as if nothing had happened. `holdfast.run.hook_process` is the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config.training import TrainingCommand
from holdfast.config.view import HookConfig
from holdfast.errors import MOST_KILLED, TrainingError
from holdfast.process.child import was_killed
from holdfast.process.imports import module_command
from holdfast.run.hooks import HookReply
from holdfast.run.metrics import plain_value
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.mesh import RankGroup
from holdfast.trainer.stop import RARE

_END_S = 5.0


class HookProcess:
    """The process of the hooks. It is started at the first call, and again if something outside killed it."""

    def __init__(self, configs: Sequence[HookConfig]) -> None:
        self._configs = [config.model_dump() for config in configs]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a call. Raise TrainingError if a hook fails, or the process ends by itself. `states`:
        of the hooks before the call."""
        for _ in range(MOST_KILLED):
            try:
                if self._process is None:
                    self._process = self._start()
                    self._exchange({"hooks": self._configs, "states": states})
                return self._exchange(request)
            except OSError:
                self._require_killed(request["view"]["step"])
        raise TrainingError(f"the process of the hooks was killed {MOST_KILLED} times by something outside the run")

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = module_command("holdfast.run.hook_process", str(os.getpid()), str(theirs.fileno()))
            # In its own session: Ctrl-C must not end it before the step is saved.
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        with ours:
            self._lines = ours.makefile("rw", encoding="utf-8")
        return started

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line.endswith("\n"):
            raise ConnectionError("the process of the hooks has ended")
        answer = json.loads(line)
        if "failed" in answer:
            raise TrainingError(answer["failed"])
        return answer

    def _require_killed(self, step: int) -> None:
        """Forget the process, which has ended. Raise TrainingError unless something outside killed it."""
        ended, self._process = self._process, None
        assert ended is not None
        if not was_killed(ended):
            raise TrainingError(
                f"the process of the hooks ended by itself at step {step}, with exit code {ended.returncode}: see the "
                "log of the trainer"
            )

    def close(self) -> None:
        """End the process; it has a short time for what it does at its exit."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._lines.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Hooks(State):
    """The hooks of a run, and their states in checkpoints. Constructor and calls are collective.

    Attributes:
        pending: the metrics of the step, if it is saved and a hook failed at it: the hooks are called again.
        saved: the step, while it is saved for `after_save`. A run that resumes there calls that again.
        waits: whether some hook has `after_save`; known after the first call.
    """

    def __init__(self, config: TrainingCommand, run_dir: RunDir) -> None:
        self._run_dir, self._max_steps = run_dir, config.max_steps
        self._labels = [hook.label for hook in config.hooks]
        self._states: dict[str, Any] = {}
        self._process = HookProcess(config.hooks)
        self._ranks = RankGroup(timeout_s=config.parallel.collective_timeout_s) if config.hooks else None
        self.pending: dict[str, float] | None = None
        self.saved: int | None = None
        self.waits = False

    def __bool__(self) -> bool:
        return bool(self._labels)

    def values(self) -> dict[str, Any]:
        """Return the states by label, and what is left to be called; empty without either."""
        whole = {"states": self._states, "pending": self.pending, "saved": self.saved if self.waits else None}
        return whole if any(whole.values()) else {}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned; a hook that is new here begins without a state."""
        self._states = {label: state for label, state in values["states"].items() if label in self._labels}
        self.pending, self.saved = values["pending"], values["saved"]

    def after_step(self, step: int, metrics: Mapping[str, float]) -> HookReply:
        """Return what the hooks ask for. Raise TrainingError, on every rank, if one fails."""
        is_evaluated = any(name.startswith(RARE) for name in metrics)
        return self._call([*["after_evaluation"] * is_evaluated, "after_step"], step, metrics)

    def after_save(self, step: int, metrics: Mapping[str, float]) -> HookReply:
        """Return what the hooks ask for now that `step` is committed. Raise as `after_step`."""
        return self._call(["after_save"], step, metrics, checkpoint=self._run_dir.checkpoint(step))

    def _call(
        self, methods: list[str], step: int, metrics: Mapping[str, float], checkpoint: Path | None = None
    ) -> HookReply:
        if self._ranks is None:
            return HookReply()
        plain = {name: plain_value(value) for name, value in metrics.items() if value is not None}
        view = {
            "step": step,
            "max_steps": self._max_steps,
            "metrics": {name: value for name, value in plain.items() if value is not None},
            "run": str(self._run_dir.path),
            "checkpoint": str(checkpoint) if checkpoint is not None else None,
        }
        request = {"methods": methods, "view": view}
        answer = self._ranks.broadcast(
            self._ranks.on_main(lambda: self._process.ask(request, self._states), error=TrainingError)
        )
        assert answer is not None
        self._states, self.waits = answer.pop("states"), answer.pop("waits")
        return HookReply(**answer)

    def close(self) -> None:
        """End the process."""
        self._process.close()
