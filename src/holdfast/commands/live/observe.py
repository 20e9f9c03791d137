"""One run as somebody sees it who has nothing to do with it: its files, and whether its launcher lives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import tomli

from holdfast.commands.live.follow import Follower
from holdfast.commands.live.view import Shown
from holdfast.commands.tables import age
from holdfast.shared.errors import NOT_SAVED
from holdfast.shared.files.lock import living_holder
from holdfast.shared.files.run_dir import SUMMARY_NAME, RunDir

# Whose processes are on another host, or in another container, is taken for living while its files change.
_SILENT_S = 600.0
_NO_CONFIGS = ("inference", "orchestrator", "evaluation", "rl")


class ObservedRun:
    """A run that is looked at.

    Args:
        name: that it is shown by.

    Attributes:
        status: `waiting` for a run to begin here; `running`; `finished`; `stopped` by a signal or a kill; `failed`.
    """

    def __init__(self, run_dir: RunDir, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self._identity = ""
        self._follower = self._new_follower()
        self._holder = ""
        self._changed_unix_s: float | None = None
        self.status = "waiting"

    @property
    def is_over(self) -> bool:
        """Whether it has ended; another attempt may begin for all that."""
        return self.status in ("finished", "stopped", "failed")

    def look(self) -> None:
        """Take in what is new."""
        identity = self._read_identity()
        if identity is None:
            self.status = "waiting"
            return
        if identity != self._identity:  # --clean, or the first look
            self._identity = identity
            self._follower = self._new_follower()
            self._follower.catch_up()
        for _ in self._follower.news():
            pass
        if (last := self._last_step()) is not None:
            self._follower.set_max_steps(last)
        self._changed_unix_s = max(
            (time for path in self._files() if (time := _modified(path)) is not None), default=None
        )
        self.status = self._status()

    def _new_follower(self) -> Follower:
        is_evaluation = (self._run_dir.path / "config" / "evaluate.toml").exists()
        return Follower(self._run_dir, events=self._run_dir.path / "logs" / "events.jsonl" if is_evaluation else None)

    def _read_identity(self) -> str | None:
        try:
            return (self._run_dir.path / "run.json").read_text()
        except OSError:
            return None

    def _status(self) -> str:
        holder = living_holder(self._run_dir.path / "run.lock")
        self._holder = str(holder) if holder is not None else ""
        silent_s = time.time() - (self._changed_unix_s or 0.0)
        if holder is not None and (holder.is_here or silent_s < _SILENT_S):
            return "running"
        state = self._follower.state
        if (self._run_dir.path / SUMMARY_NAME).exists():
            return "finished"
        if state.ended is not None:
            code = state.ended.get("exit_code")
            if code == 0:
                return "finished"
            return "stopped" if not isinstance(code, int) or code >= 128 or code == NOT_SAVED else "failed"
        # No last word: its launcher was killed, or the trainer was started by hand.
        is_done = state.max_steps is not None and state.step >= state.max_steps
        return "finished" if is_done and self._run_dir.weights_of(state.step).is_dir() else "stopped"

    def _last_step(self) -> int | None:
        """Return the step that the newest attempt trains until, by its settings."""
        if self._follower.state.max_steps is not None:
            return None  # the trainer has said so
        directory = self._run_dir.configs(self._run_dir.next_attempt() - 1)
        for path in sorted(directory.glob("*.toml")):
            if path.stem in _NO_CONFIGS or path.stem.startswith("inference_"):
                continue
            try:
                last = tomli.loads(path.read_text()).get("max_steps")
            except (OSError, ValueError):
                continue
            if isinstance(last, int):
                return last
        return None

    def _files(self) -> list[Path]:
        logs = self._run_dir.logs(max(1, self._follower.state.attempt))
        return [self._run_dir.metrics, self._run_dir.path / "logs" / "events.jsonl", *logs.glob("*")]

    def _since(self) -> str:
        state, now = self._follower.state, time.time()
        if self.status == "running" and state.begun_unix_s is not None:
            return f"for {age(now - state.begun_unix_s)}"
        ended = state.ended.get("unix_s") if state.ended is not None else self._changed_unix_s
        return f"{age(now - ended)} ago" if self.is_over and ended else ""

    def shown(self) -> Shown:
        """Return what a view is made of."""
        return Shown(self._name, self.status, self._follower.state, self._follower.checkpoints, self._since())

    def document(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        state, found = self._follower.state, self._follower.checkpoints
        bottleneck = state.bottleneck
        return {
            "run": str(self._run_dir.path),
            "status": self.status,
            "holder": self._holder or None,
            "attempt": state.attempt or None,
            "restarts": state.restarts,
            "begun_unix_s": state.begun_unix_s,
            "changed_unix_s": self._changed_unix_s,
            "ended": state.ended,
            "step": state.step,
            "max_steps": state.max_steps,
            "left_s": state.left_s if self.status == "running" else None,
            "metrics": state.metrics,
            "bottleneck": None
            if bottleneck is None
            else {
                "who": bottleneck.who,
                "why": bottleneck.why,
                "trainer_waits": bottleneck.trainer_waits,
                "engine_idle": bottleneck.engine_idle,
            },
            "phases": {phase.process: phase.name for phase in state.phases.values()},
            "checkpoint": {
                "committed": found.good,
                "committed_unix_s": found.saved_unix_s,
                "saving": found.saving if self.status == "running" else None,
                "damaged": list(found.damaged),
                "steps": list(found.steps),
            },
            "alerts": [
                {"kind": alarm.kind, "step": alarm.step, "time": alarm.unix_s, "text": alarm.text}
                for alarm in state.alarms
            ],
        }


def _modified(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return None
