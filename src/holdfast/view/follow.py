"""Follows runs by their files: `Tail` one file, `Follower` what is new of a run, `ObservedRun` how a run is."""

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast.errors import NOT_SAVED, CheckpointError, is_storage_failure, printable
from holdfast.run.choose_run import is_evaluation
from holdfast.run.lock import living_holder
from holdfast.run.run_dir import SUMMARY_NAME, RunDir
from holdfast.run.settings import settings_of_trainers
from holdfast.view.state import Alarm, Checkpoints, Phase, RunState, look_at_checkpoints
from holdfast.view.tables import age

_KEPT_BYTES = 4096
_ATTEMPT = re.compile(r"attempt_(\d+)")
_LOOK_FOR_ATTEMPTS_S = 1.0
_LIVE_ATTEMPTS = 2
"""An inference server that outlived its attempt may still write to the logs of the attempt before."""
_SILENT_S = 600.0
"""A holder of a run on another host or in another container lives if files of the run changed since."""


class Tail:
    """Complete new lines of a growing file, as JSON objects; other lines are left out.

    A file is known by its last bytes that were read, not by its inode: some file systems (SMB, FUSE, NFS) give a file
    another inode later.

    Attributes:
        replaced: how often another or a shorter file was found in its place, and read from its beginning.
        failure: why the storage did not give all lines at the last look; None if it did.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._before = b""  # the bytes before the offset
        self._seen: tuple[int, ...] | None = None  # of the file, when it was read to its end
        self.replaced = 0
        self.failure: OSError | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.failure = None
        try:
            yield from self._new_lines()
        except FileNotFoundError:  # nothing is written yet
            return
        except OSError as error:
            self.failure = error
            if not is_storage_failure(error):
                raise  # else a later look reads the lines

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        status = os.stat(self._path)  # noqa: PTH116 - ten times a second
        seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return
        with open(self._path, "rb") as file:
            self._find_place(file)
            for line in file:
                if not line.endswith(b"\n"):  # a later look reads it whole
                    break
                self._offset += len(line)
                self._before = (self._before + line)[-_KEPT_BYTES:]
                if isinstance(value := _decoded(line), dict):
                    yield value
        self._seen = seen  # as before it was read: the next look reads what came meanwhile

    def _find_place(self, file: BinaryIO) -> None:
        file.seek(self._offset - len(self._before))
        if file.read(len(self._before)) != self._before:
            self._offset, self._before = 0, b""
            self.replaced += 1
            file.seek(0)


def _decoded(line: bytes) -> Any:
    """Return the JSON of a line; None if it is damaged."""
    try:
        try:
            return msgspec.json.decode(line)  # takes a fifth of the time
        except ValueError:
            return json.loads(line)  # accepts NaN
    except (ValueError, RecursionError):  # the latter for brackets without an end
        return None


class EventLog:
    """Reads the events of a run while it writes them, with the numbers of their attempts.

    Args:
        attempt: the attempt that is about to begin.
        whole: the file with all events of `evaluate`, which has no attempts.
    """

    def __init__(self, run_dir: RunDir, *, attempt: int | None = None, whole: Path | None = None) -> None:
        self._run_dir = run_dir
        self._tails = {} if whole is None else {1: Tail(whole)}
        self._seen: set[int] = set()
        self._looked = float("-inf")
        if attempt is not None:  # not only after the next look for attempts
            self._add(attempt)

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if time.monotonic() - self._looked >= _LOOK_FOR_ATTEMPTS_S:
            self._looked = time.monotonic()
            new = self._attempts() - self._seen
            if not new:  # the earlier attempts have been read
                self._tails = {number: self._tails[number] for number in sorted(self._tails)[-_LIVE_ATTEMPTS:]}
            for number in new:
                self._add(number)
        for number in sorted(self._tails):
            yield from ((number, event) for event in self._tails[number])

    def _attempts(self) -> set[int]:
        with suppress(OSError):
            paths = (self._run_dir.path / "logs").iterdir()
            return {int(match[1]) for path in paths if (match := _ATTEMPT.fullmatch(path.name))}
        return set()

    def _add(self, attempt: int) -> None:
        self._seen.add(attempt)
        self._tails[attempt] = Tail(self._run_dir.logs(attempt) / "events.jsonl")


@dataclass(frozen=True)
class Stepped:
    """A step has ended; `left_s` is the time until the last step, if known."""

    metrics: dict[str, Any]
    left_s: float | None


News = Stepped | Phase | Alarm


class Follower:
    """Reads what is new of a run, and writes nothing; `max_steps` if it is known."""

    def __init__(self, run_dir: RunDir, events: EventLog | None = None, *, max_steps: int | None = None) -> None:
        self._run_dir = run_dir
        self._events = events or EventLog(run_dir)
        self._metrics = Tail(run_dir.metrics)
        self._replaced = 0
        self._is_behind = False  # steps are read that are not news
        self.state = RunState(max_steps=max_steps)

    def catch_up(self) -> None:
        """Read everything that is there, without news of it."""
        self._is_behind = True
        for _ in self.news():
            pass

    def news(self) -> Iterator[News]:
        """Yield what is new since the last call. Events of a step come after the step."""
        # Events are read first: the steps that they follow are there by then.
        events = deque(self._new_events())
        for stepped in self._new_steps():
            while events and not _is_after(events[0], int(stepped.metrics["step"])):
                yield events.popleft()
            yield stepped
        yield from events

    def _new_steps(self) -> Iterator[Stepped]:
        try:
            ended_unix_s = self._run_dir.metrics.stat().st_mtime
        except OSError:
            ended_unix_s = time.time()
        for line in self._metrics:
            self._start_over_if_replaced()
            if not isinstance(line.get("step"), int):
                continue
            self.state.take_step(line, unix_s=ended_unix_s)
            if not self._is_behind:
                yield Stepped(line, self.state.left_s)
        self._start_over_if_replaced()  # by an empty file
        if self._metrics.failure is None:
            self._is_behind = False

    def _start_over_if_replaced(self) -> None:
        if self._metrics.replaced != self._replaced:  # a resume has cut the file off
            self._replaced = self._metrics.replaced
            self._is_behind = True
            self.state.forget_steps()

    def _new_events(self) -> Iterator[Phase | Alarm]:
        events = (self.state.take_event(event, attempt=number) for number, event in self._events.new())
        return (event for event in events if event is not None)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return names of runs that differ: their paths below the directory that holds all of them."""
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return [printable(path.absolute().relative_to(shared)) for path in paths]


def _is_after(event: Phase | Alarm, step: int) -> bool:
    of = event.step if isinstance(event, Alarm) else event.details.get("step")
    return isinstance(of, int) and of >= step


class ObservedRun:
    """A run as it is seen from outside.

    Attributes:
        status: `waiting` for a run to begin here; `unreadable` so far; `running`; `silent`: held by a process elsewhere
            that writes nothing any more; `finished`; `stopped` by a signal or a kill; `failed`.
        holder: the process that holds the run, or an empty text.
        changed_unix_s: when any process of the run wrote last.
    """

    def __init__(self, run_dir: RunDir, name: str) -> None:
        self.run_dir = run_dir
        self.name = name
        self.status = "waiting"
        self.holder = ""
        self.changed_unix_s: float | None = None
        self.is_evaluation = False
        self.checkpoints = Checkpoints()
        self._follower = Follower(run_dir)
        self._identity = b""
        self._trouble = ""

    @property
    def state(self) -> RunState:
        return self._follower.state

    @property
    def is_running(self) -> bool:
        return self.status not in ("finished", "stopped", "failed")

    @property
    def since(self) -> str:
        """The words after the status: for how long, since when, or why."""
        match self.status:
            case "unreadable":
                return f"({self._trouble})"
            case "silent":
                return f"(no heartbeat for {age(self._silent_s())})"
            case "running" if self.state.begun_unix_s is not None:
                return f"for {age(time.time() - self.state.begun_unix_s)}"
        ended = self.changed_unix_s if self.state.ended is None else self.state.ended.get("unix_s")
        return "" if self.is_running or not ended else f"{age(time.time() - ended)} ago"

    def look(self) -> None:
        """Read what is new; what was known stays while the storage does not give it."""
        try:
            self._look()
        except OSError as error:  # or --clean removes the run at this moment
            self._trouble = error.strerror or str(error)
            if not self._identity:
                self.status = "unreadable"

    def _look(self) -> None:
        try:
            identity = (self.run_dir.path / "run.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            self.status = "waiting"
            return
        if identity != self._identity:  # the first look, or another run after --clean
            self.is_evaluation = is_evaluation(self.run_dir.path)
            whole = self.run_dir.path / "logs" / "events.jsonl" if self.is_evaluation else None
            follower = Follower(self.run_dir, EventLog(self.run_dir, whole=whole))
            follower.catch_up()
            self._follower, self._identity = follower, identity
        for _ in self._follower.news():
            pass
        if self.state.max_steps is None:
            self.state.max_steps = _max_steps(self.run_dir)
        self.checkpoints = look_at_checkpoints(self.run_dir.checkpoints)
        self.changed_unix_s = _last_change(self.run_dir)
        self.status = self._status()

    def _status(self) -> str:
        holder, state = living_holder(self.run_dir.path / "run.lock"), self.state
        self.holder = str(holder) if holder is not None else ""
        if holder is not None and (holder.is_here or (state.ended is None and self._silent_s() < _SILENT_S)):
            return "running"
        if (self.run_dir.path / SUMMARY_NAME).exists():
            return "finished"
        if state.ended is not None:
            code = state.ended.get("exit_code")
            if code == 0:
                return "finished"
            return "stopped" if not isinstance(code, int) or code >= 128 or code == NOT_SAVED else "failed"
        # Without a last word the launcher was killed, or the trainer was started by hand.
        is_done = state.max_steps is not None and state.step >= state.max_steps
        if is_done and self.run_dir.weights_of(state.step).is_dir():
            return "finished"
        return "stopped" if holder is None else "silent"

    def _silent_s(self) -> float:
        return time.time() - (self.changed_unix_s or 0.0)


def _max_steps(run_dir: RunDir) -> int | None:
    """Return the last step by the settings of the newest attempt, before its trainer has said it."""
    with suppress(OSError, CheckpointError):
        _, settings = next(settings_of_trainers(run_dir), ("", {}))
        return settings.get("max_steps")
    return None


def _last_change(run_dir: RunDir) -> float | None:
    """Return when any process of the run wrote last. Logs, timelines and generations change within a long step."""
    paths = [run_dir.metrics, run_dir.path / "run.lock", run_dir.checkpoints]
    for directory in (run_dir.path / "logs", run_dir.newest_logs(), run_dir.rollouts):
        with suppress(OSError):
            paths += directory.iterdir()
    times: list[float] = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)
