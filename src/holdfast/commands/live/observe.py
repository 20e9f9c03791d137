"""One run as somebody sees it who has nothing to do with it: its files, and whether its launcher lives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import tomli

from holdfast.commands.live.follow import Follower
from holdfast.commands.live.state import LAUNCHER
from holdfast.commands.live.tails import Tail
from holdfast.commands.live.view import Shown
from holdfast.commands.tables import age
from holdfast.shared.errors import NOT_SAVED
from holdfast.shared.files.lock import living_holder
from holdfast.shared.files.run_dir import SUMMARY_NAME, RunDir

# Whether a process on another host, or in another container, lives, is told by the files of its run alone.
_SILENT_S = 600.0
_NO_CONFIGS = ("inference", "orchestrator", "evaluation", "rl")


class ObservedRun:
    """A run that is looked at.

    Args:
        name: that it is shown by.

    Attributes:
        status: `waiting` for a run to begin here; `unreadable` so far; `running`; `silent`: held by a process elsewhere
            that writes nothing any more; `finished`; `stopped` by a signal or a kill; `failed`.
    """

    def __init__(self, run_dir: RunDir, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self._identity = b""
        self._of_nodes: dict[Path, Tail] = {}
        self._follower = Follower(run_dir)
        self._holder = ""
        self._trouble = ""
        self._changed_unix_s: float | None = None
        self._is_evaluation = False
        self.status = "waiting"

    @property
    def is_over(self) -> bool:
        """Whether it has ended; another attempt may begin for all that."""
        return self.status in ("finished", "stopped", "failed")

    def look(self) -> None:
        """Take in what is new; what was known stays while the storage does not give it."""
        try:
            self._look()
        except OSError as error:  # it is away, or --clean removes at this moment what was there
            self._trouble = error.strerror or str(error)
            if not self._identity:
                self.status = "unreadable"

    def _look(self) -> None:
        identity = self._read_identity()
        if identity is None:
            self.status = "waiting"
            return
        if identity != self._identity:  # --clean, or the first look
            follower = self._new_follower()
            if (last := self._last_step()) is not None:
                follower.set_max_steps(last)
            follower.catch_up()
            self._follower, self._identity, self._of_nodes = follower, identity, {}
        self._count_restarts_of_nodes()
        for _ in self._follower.news():
            pass
        if self._follower.state.max_steps is None and (last := self._last_step()) is not None:
            self._follower.set_max_steps(last)
        self._changed_unix_s = self._last_sign_of_life()
        self.status = self._status()

    def _new_follower(self) -> Follower:
        self._is_evaluation = (self._run_dir.path / "config" / "evaluate.toml").exists()
        events = self._run_dir.path / "logs" / "events.jsonl" if self._is_evaluation else None
        return Follower(self._run_dir, events=events)

    def _count_restarts_of_nodes(self) -> None:
        """Take in what the launchers of other nodes have started again; what else they say, the first one does, too."""
        for path in (self._run_dir.path / "logs").glob("attempt_*/events_node_*.jsonl"):
            if path not in self._of_nodes:
                self._of_nodes[path] = Tail(path, from_end=False)
        for tail in self._of_nodes.values():
            said = [event for event in tail if event.get("process") == LAUNCHER]
            self._follower.state.restarts += sum(event.get("phase") == "starting again" for event in said)

    def _read_identity(self) -> bytes | None:
        try:
            return (self._run_dir.path / "run.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _status(self) -> str:
        holder = living_holder(self._run_dir.path / "run.lock")
        self._holder = str(holder) if holder is not None else ""
        state = self._follower.state
        if holder is not None and (holder.is_here or (state.ended is None and self._silent_s() < _SILENT_S)):
            return "running"
        if (self._run_dir.path / SUMMARY_NAME).exists():
            return "finished"
        if state.ended is not None:
            code = state.ended.get("exit_code")
            if code == 0:
                return "finished"
            return "stopped" if not isinstance(code, int) or code >= 128 or code == NOT_SAVED else "failed"
        # No last word: its launcher was killed, or the trainer was started by hand.
        is_done = state.max_steps is not None and state.step >= state.max_steps
        if is_done and self._run_dir.weights_of(state.step).is_dir():
            return "finished"
        return "stopped" if holder is None else "silent"

    def _silent_s(self) -> float:
        return time.time() - (self._changed_unix_s or 0.0)

    def _last_step(self) -> int | None:
        """Return the step that the newest attempt trains until, by its settings: its trainer has yet to say so."""
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

    def _last_sign_of_life(self) -> float | None:
        """Return when any process of the run wrote last, in unix seconds; None where there is nothing of them.

        A long step or start leaves metrics and events alone: logs, timelines and finished generations go on.
        """
        run_dir = self._run_dir
        times = [_modified(path) for path in (run_dir.metrics, run_dir.path / "run.lock", run_dir.checkpoints)]
        for directory in (run_dir.path / "logs", run_dir.newest_logs(), run_dir.rollouts):
            times += _modified_in(directory)
        return max((time for time in times if time is not None), default=None)

    def _since(self) -> str:
        state, now = self._follower.state, time.time()
        if self.status == "unreadable":
            return f"({self._trouble})"
        if self.status == "silent":
            return f"(no sign of life for {age(self._silent_s())})"
        if self.status == "running" and state.begun_unix_s is not None:
            return f"for {age(now - state.begun_unix_s)}"
        ended = state.ended.get("unix_s") if state.ended is not None else self._changed_unix_s
        return f"{age(now - ended)} ago" if self.is_over and ended else ""

    def shown(self) -> Shown:
        """Return what a view is made of."""
        follower = self._follower
        return Shown(self._name, self.status, follower.state, follower.checkpoints, self._since(), self._is_evaluation)

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
                "unreadable": list(found.unreadable),
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


def _modified_in(directory: Path) -> list[float | None]:
    try:
        with os.scandir(directory) as entries:
            return [_modified(Path(entry.path)) for entry in entries]
    except OSError:
        return []
