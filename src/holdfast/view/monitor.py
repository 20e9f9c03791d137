"""The command `monitor`: shows runs that other commands started, from their files, without writes and locks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tomli

from holdfast.arguments import Parser, add_json
from holdfast.errors import NOT_SAVED, ConfigError, DataError
from holdfast.process.child import make_output_lossy
from holdfast.run.lock import living_holder
from holdfast.run.run_dir import SUMMARY_NAME, RunDir
from holdfast.view.console import Shown, run_lines, table_of_runs
from holdfast.view.follow import Follower, Tail
from holdfast.view.state import LAUNCHER
from holdfast.view.tables import Grid, age, print_parts

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
        for _, path in self._run_dir.logged("events_node_*.jsonl"):
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
            return f"(no heartbeat for {age(self._silent_s())})"
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


_SIGNALS_S = 0.1


def main(argv: list[str]) -> int:
    """Show one run or several until Ctrl-C; return the exit code, 0.

    Raises:
        ConfigError, DataError: a mistake on the command line, or a directory that holds no run.
    """
    arguments = _parse(argv)
    if not arguments.wait:
        for path in arguments.runs:
            _require_run(path)
    runs = [ObservedRun(RunDir(path), name) for path, name in zip(arguments.runs, _names(arguments.runs), strict=True)]
    if arguments.once or arguments.json or not sys.stdout.isatty():
        return _print(runs, arguments)
    make_output_lossy()
    return _watch(runs, arguments)


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="monitor",
        allow_abbrev=False,
        description="Show what runs are doing, from their files alone: nothing is written, no lock is taken. Ctrl-C "
        "ends it, which does nothing to the runs. See docs/console.md.",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run directories; several are rows of a table"
    )
    parser.add_argument("--once", action="store_true", help="print what is known now, and end, as without a terminal")
    add_json(parser)
    parser.add_argument("--wait", action="store_true", help="wait for directories that hold no run yet")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    arguments = parser.parse_args(argv)
    if not arguments.runs:
        raise ConfigError("name at least one run directory, as in `monitor outputs/reverse_text_rl`")
    if not 0.05 <= arguments.interval <= 3600:
        raise ConfigError(f"--interval {arguments.interval:g} is not allowed: give 0.05 to 3600 seconds")
    return arguments


def _require_run(path: Path) -> None:
    """Refuse what holds no run.

    Raises:
        DataError: naming what is there, and what to do.
    """
    if RunDir(path).holds_run():
        return
    if not path.exists():
        what = f"there is no directory {path} (from {Path.cwd()})"
    elif not path.is_dir():
        what = f"{path} is a file, and not a run directory"
    else:
        inside = sorted(one.name for one in path.iterdir() if one.is_dir() and RunDir(one).holds_run())
        below = f" It has runs below it: {', '.join(inside[:5])}." if inside else ""
        what = f"{path} holds no run: it has no run.json.{below}"
    raise DataError(f"{what.rstrip('.')}. Give the --output-dir of a run; --wait waits for one that is about to start.")


def _names(paths: Sequence[Path]) -> list[str]:
    """Return short names that differ."""
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return [str(path.absolute().relative_to(shared)) for path in paths]


def _print(runs: Sequence[ObservedRun], arguments: Namespace) -> int:
    """Print what is known now; with `--wait`, as soon as every run is there."""
    with _ended_by_signals() as ended:
        _look(runs)
        while arguments.wait and any(run.status in ("waiting", "unreadable") for run in runs) and not ended:
            _sleep(arguments.interval, ended)
            _look(runs)
    if arguments.json:
        documents = [run.document() for run in runs]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, default=str))
        return 0
    print_parts(_parts(runs))
    return 0


def _sleep(seconds: float, ended: Sequence[int]) -> None:
    """Wait, until a signal at most: Python goes on sleeping after one that is only noted."""
    until = time.monotonic() + seconds
    while not ended and (left := until - time.monotonic()) > 0:
        time.sleep(min(_SIGNALS_S, left))


def _watch(runs: Sequence[ObservedRun], arguments: Namespace) -> int:
    """Show what is known again and again, until a signal; what was known last stays."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with _ended_by_signals() as ended, Live(console=console, auto_refresh=False) as live:
        while not ended:
            _look(runs)
            parts = [part.fitted(console) if isinstance(part, Grid) else Text(part) for part in _parts(runs)]
            live.update(Group(*parts), refresh=True)
            _sleep(arguments.interval, ended)
    return 0


def _look(runs: Sequence[ObservedRun]) -> None:
    for run in runs:
        run.look()


def _parts(runs: Sequence[ObservedRun]) -> list[Grid | str]:
    shown, now = [run.shown() for run in runs], time.time()
    return [*run_lines(shown[0], now=now)] if len(shown) == 1 else [table_of_runs(shown, now=now)]


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Give a list that a signal which asks for the end is put into."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
