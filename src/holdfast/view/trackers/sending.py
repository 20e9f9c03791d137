"""Sends the steps, evaluations and alarms of one run to one tracker, from where it stopped until the run is over.

`Cursor` keeps how far a tracker has come, in `tracking/<tracker>.json` of the run directory. `Lines` reads
`metrics.jsonl`, also while resumes replace the file. Evaluations of `sft` and `dpo` are files of the run, not lines of
`metrics.jsonl`. Alarms are alerts and warnings from the events of all attempts.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config.view import TrackingConfig
from holdfast.errors import DataError, HoldfastError, RunDirError
from holdfast.run import atomic, checked, lock
from holdfast.run.run_dir import RunDir, number_of, numbered_paths
from holdfast.run.settings import settings_of_attempt
from holdfast.view.follow import Tail, attempts_with_logs
from holdfast.view.state import Alarm, RunState
from holdfast.view.trackers.interface import TrackedRun, Tracker, load_tracker

_log = logging.getLogger("holdfast")


class _State(msgspec.Struct):
    run_id: str
    history: int = 1
    rewinds: int = 0
    step: int = 0
    evaluated: list[int] = []
    alarms: dict[str, int] = {}


@dataclass
class Cursor:
    """Where a tracker goes on.

    Attributes:
        run_id: of the run that this is about.
        history: which of the ways that the run took is sent: 1, until it goes back behind what was sent.
        step: the last one that was sent and flushed.
        evaluated: steps whose evaluations beside training were sent.
        alarms: by attempt, how many of its alerts and warnings were sent.
    """

    path: Path
    _state: _State

    @classmethod
    def take(cls, run_dir: RunDir, tracker: str) -> Cursor:
        """Take the cursor for this process.

        Raises:
            RunDirError: another process sends to this tracker, or the cursor cannot be used.
        """
        path = run_dir.tracking / f"{label_of(tracker)}.json"
        atomic.make_directory(path.parent)
        if (holder := lock.take(path.with_suffix(".lock"))) is not None:
            raise RunDirError(
                f"{run_dir.path} is being sent to {tracker} already ({holder}): the run itself does, or another `track`"
            )
        run_id, rewinds = run_dir.run_id(), run_dir.rewinds()
        try:
            state = msgspec.convert(checked.decode(path.read_bytes()), _State)
        except FileNotFoundError:
            state = _State(run_id, rewinds=len(rewinds))
        except ValueError as error:  # those of msgspec are such
            raise RunDirError(f"{path} is damaged: {error}. Without it everything is sent again: remove it.") from None
        if state.run_id != run_id:
            state = _State(run_id, rewinds=len(rewinds))
        if any(step < state.step for step in rewinds[state.rewinds :]):
            # No tracker takes back what it has: the new way begins a run of its own there, with the steps before.
            state.history, state.step, state.evaluated = len(rewinds) + 1, 0, []
        state.rewinds = len(rewinds)
        return cls(path, state)

    @property
    def run_id(self) -> str:
        """The id under which the tracker knows the run."""
        return self._state.run_id if self.history == 1 else f"{self._state.run_id}-{self.history}"

    @property
    def history(self) -> int:
        """See above."""
        return self._state.history

    @property
    def step(self) -> int:
        """See above."""
        return self._state.step

    @property
    def evaluated(self) -> list[int]:
        """See above."""
        return self._state.evaluated

    @property
    def alarms(self) -> dict[str, int]:
        """See above."""
        return self._state.alarms

    def begin_anew(self) -> None:
        """Know nothing as sent that is no step."""
        self._state.evaluated, self._state.alarms = [], {}

    def write(self, step: int) -> None:
        """Note that everything up to `step` is sent, and what else was added to the attributes."""
        self._state.step = step
        atomic.write_file(self.path, checked.encode(msgspec.to_builtins(self._state)))


def label_of(tracker: str) -> str:
    """Return the part of file names that stands for a tracker: `module:Class` has a colon, and dots."""
    return re.sub(r"\W", "_", tracker)


_MOST_LINES = 500
# Trackers keep steps as integers of 64 bits.
_MOST_STEPS = 2**53


class Lines:
    """Reads the whole lines of a growing file; one that was replaced is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, from_end=False)

    def new(self) -> list[tuple[int, dict[str, float]]]:
        """Return the steps that have come since the last call, some hundreds at most, and their numbers.

        Raises:
            OSError: the file cannot be read.
        """
        steps = [_step_of(line) for line in islice(self._tail, _MOST_LINES)]
        if self._tail.failure is not None:
            raise self._tail.failure
        return [step for step in steps if step is not None]


def _step_of(line: dict[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Return step and numbers of a line; None of one without a step, which the next resume sets aside."""
    step = line.pop("step", None)
    if not isinstance(step, int) or not 0 < step < _MOST_STEPS:
        return None
    return step, {name: value for name, value in line.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_PROGRAMS = ("sft", "dpo")


class Evaluations:
    """What evaluations beside a run have found; none of an `rl` run, whose lines have it.

    Args:
        attempt: whose settings say what is trained.
    """

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = run_dir
        self._are_beside = any((run_dir.configs(attempt) / f"{name}.toml").exists() for name in _PROGRAMS)
        self._read: dict[int, dict[str, float]] = {}

    def but(self, sent: Collection[int]) -> list[tuple[int, dict[str, float]]]:
        """Return step and numbers of those that have ended and are not `sent`, in the order of steps."""
        from holdfast.orchestrator.evaluation.statistics import summary_in  # NumPy, which launchers do without

        for path in numbered_paths(self._run_dir.evaluations) if self._are_beside else []:
            step = number_of(path)
            if step in sent or step in self._read or not self._run_dir.is_evaluated(step):
                continue
            try:
                metrics = summary_in(path).metrics() | {"eval/version": float(step)}
            except DataError as error:
                _log.warning("an evaluation is not sent: %s", error)
                metrics = {}
            self._read[step] = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return [(step, metrics) for step, metrics in sorted(self._read.items()) if metrics and step not in sent]


class Alarms:
    """Reads the alarms of a run as they come.

    Args:
        sent: how many of each attempt are left out, its first ones, by what `new` calls it.
        without: the process whose own warnings are left out.
    """

    def __init__(self, run_dir: RunDir, sent: Mapping[str, int], *, without: str) -> None:
        self._run_dir = run_dir
        self._left_out = dict(sent)
        self._without = without
        self._tails: dict[int, Tail] = {}
        self._begins: dict[int, str] = {}

    def new(self) -> Iterator[tuple[str, Alarm]]:
        """Yield attempt and alarm of what came since the last call, and was not sent.

        An attempt is called by its number and the time of its first event: on another machine numbers begin anew.
        """
        for number in attempts_with_logs(self._run_dir):
            if number not in self._tails:
                self._tails[number] = Tail(self._run_dir.logs(number) / "events.jsonl", from_end=False)
        for number, tail in sorted(self._tails.items()):
            for event in tail:
                attempt = self._begins.setdefault(number, f"{number} at {event.get('time')}")
                told = RunState().take_event(event, attempt=number)
                if not isinstance(told, Alarm) or told.process == self._without:
                    continue
                if self._left_out.get(attempt, 0) > 0:
                    self._left_out[attempt] -= 1
                    continue
                yield attempt, told


LOOK_S = 1.0


class TrackerFailed(HoldfastError):
    """A tracker, or the way to it, failed. What it has not taken is in `metrics.jsonl`."""


class Sending:
    """Sends one run to one tracker.

    Args:
        name: the tracker, of `TrackingConfig.backends`.

    Raises:
        RunDirError: another process sends it there.
        ConfigError: there is no such tracker.
    """

    def __init__(self, run_dir: RunDir, name: str, config: TrackingConfig) -> None:
        self._run_dir = run_dir
        self._name = name
        self._config = config
        self._class = load_tracker(name, key="tracking.backends")
        self._cursor = Cursor.take(run_dir, name)
        self.step = 0
        """The last step that the tracker has, since it has begun."""

    def send(self, is_over: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> None:
        """Send what is not sent yet, and what comes, until `is_over`; return when the tracker has it all.

        Args:
            is_over: whether no further step comes.
            wait: waits for so many seconds, or for less when there is news.

        Raises:
            TrackerFailed: by whatever the tracker raised.
        """
        try:
            tracker = self._class()
            # In this order: an attempt that begins in between is told by the next process.
            attempt = self._run_dir.next_attempt() - 1
            self.step = tracker.begin(self._tracked_run(attempt), after=self._cursor.step)
            if tracker.begins_anew:
                self._cursor.begin_anew()
            self._evaluations = Evaluations(self._run_dir, attempt)
            self._alarms = Alarms(self._run_dir, self._cursor.alarms, without=self._name)
            try:
                self._follow(tracker, is_over, wait)
            finally:
                tracker.close()
        except Exception as error:  # whatever a library raises, training does not depend on it
            raise TrackerFailed(f"{self._name}: {type(error).__name__}: {error}") from error
        self._note()

    def _follow(self, tracker: Tracker, is_over: Callable[[], bool], wait: Callable[[float], None]) -> None:
        lines = Lines(self._run_dir.metrics)
        while True:
            over = is_over()  # before the look: what comes in between is seen by the next one
            steps = lines.new()
            ended = self._evaluations.but(self._cursor.evaluated)
            before = self.step
            more = self._send_alarms(tracker)
            for step, metrics in steps:
                if step > self.step:  # else it is trained again after a restart: with the same result
                    tracker.log(step, metrics)
                    self.step = step
                    more += self._send_evaluations(tracker, ended)
            is_last = over and not steps
            more += self._send_evaluations(tracker, ended, is_last=is_last)
            if self.step > before or more:
                tracker.flush()
                self._note(more)
            if is_last:
                return
            if not steps:
                wait(LOOK_S)

    def _send_evaluations(
        self, tracker: Tracker, ended: list[tuple[int, dict[str, float]]], *, is_last: bool = False
    ) -> int:
        """Send those that have ended, of steps that are sent, and take them off the list; return how many."""
        taken = [
            one for one in ended if one[0] <= self.step and tracker.log_evaluation(one[0], one[1], is_last=is_last)
        ]
        for one in taken:
            ended.remove(one)
            self._cursor.evaluated.append(one[0])
        return len(taken)

    def _send_alarms(self, tracker: Tracker) -> int:
        """Send new alerts and warnings; return how many."""
        number = 0
        for attempt, alarm in self._alarms.new():
            tracker.alert(alarm.kind, alarm.text, step=alarm.step)
            self._cursor.alarms[attempt] = self._cursor.alarms.get(attempt, 0) + 1
            number += 1
        return number

    def _note(self, more: int = 0) -> None:
        """Note how far the tracker has come."""
        if self.step != self._cursor.step or more:
            self._cursor.write(self.step)

    def _tracked_run(self, attempt: int) -> TrackedRun:
        cursor, config = self._cursor, self._config
        settings: Mapping[str, object] = settings_of_attempt(self._run_dir, attempt)
        name = config.name or self._run_dir.path.name
        return TrackedRun(
            id=cursor.run_id,
            history=cursor.history,
            name=name if cursor.history == 1 else f"{name} ({cursor.history})",
            project=config.project,
            tags=tuple(config.tags),
            directory=self._run_dir.path,
            settings=settings,
            attempt=attempt,
            origin=self._run_dir.origin() if cursor.history == 1 else self._run_dir.run_id(),
        )
