"""Sends the steps, evaluations and alarms of one run to one tracker, from where it stopped until the run is over.

`Cursor` is how far a tracker has come, in `tracking/<tracker>.json` of the run directory. Evaluations of `sft` and
`dpo` are files of the run; evaluations of `rl` are in the lines of `metrics.jsonl`.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config.view import TrackingConfig
from holdfast.errors import DataError, HoldfastError, RunDirError
from holdfast.run import atomic, checked, lock
from holdfast.run.run_dir import RunDir, number_of, numbered_paths
from holdfast.run.settings import settings_of_attempt
from holdfast.view.answers import TextOf, read_answers, shown_parts, spread, text_of
from holdfast.view.follow import EventLog, Tail
from holdfast.view.load_tracker import load_tracker
from holdfast.view.state import alarm_of
from holdfast.view.tracker import TrackedRun

_log = logging.getLogger("holdfast")
_LOOK_S = 1.0
_MAX_LINES = 500
_ANSWERS = 8
_COLUMNS = (
    "environment",
    "task",
    "sample",
    "reward",
    "advantage",
    "ended",
    "tokens",
    "prompt",
    "answer",
    "right_answer",
)
_MAX_STEPS = 2**53
"""Trackers keep steps as integers of 64 bits."""


class Cursor(msgspec.Struct):
    """How far a tracker has come.

    Attributes:
        history: counts the histories of the run: a new one begins when the run goes back to before what was sent.
        rewinds: how many rewinds of the run are taken into account.
        step: the last step that was sent and flushed.
        tried: the last step that may have been sent, if a kill came before the flush.
        evaluated: steps whose evaluations were sent.
        alerted: how many alerts and warnings of each attempt were sent; clocks of attempts may differ.
    """

    run_id: str
    history: int = 1
    rewinds: int = 0
    step: int = 0
    tried: int = 0
    evaluated: list[int] = []
    alerted: dict[str, int] = {}

    @property
    def tracked_id(self) -> str:
        """The id under which the tracker knows the run."""
        return self.run_id if self.history == 1 else f"{self.run_id}-{self.history}"

    def write(self, run_dir: RunDir, tracker: str) -> None:
        atomic.write_file(_path(run_dir, tracker), checked.encode(msgspec.to_builtins(self)))


def _path(run_dir: RunDir, tracker: str) -> Path:
    return run_dir.tracking / f"{label_of(tracker)}.json"


def label_of(tracker: str) -> str:
    """Return the part of file names that stands for a tracker: `module:Class` has a colon, and dots."""
    return re.sub(r"\W", "_", tracker)


def take_cursor(run_dir: RunDir, tracker: str) -> Cursor:
    """Return the cursor of a tracker, and keep other processes from it. Raise RunDirError if another process sends to
    this tracker, or the cursor is damaged."""
    path = _path(run_dir, tracker)
    atomic.make_directory(path.parent)
    if (holder := lock.take(path.with_suffix(".lock"))) is not None:
        raise RunDirError(
            f"{run_dir.path} is being sent to {tracker} already ({holder}): the run itself does, or another `track`"
        )
    for left in path.parent.glob(f"{atomic.TEMPORARY_PREFIX}{path.name}-*"):  # by a killed process
        left.unlink()
    rewinds = run_dir.rewinds()
    new = Cursor(run_dir.run_id(), rewinds=len(rewinds))
    try:
        cursor = msgspec.convert(checked.decode(path.read_bytes()), Cursor)
    except FileNotFoundError:
        return new
    except ValueError as error:  # msgspec's errors are such
        raise RunDirError(f"{path} is damaged: {error}. Without it everything is sent again: remove it.") from None
    if cursor.run_id != new.run_id:
        return new
    if any(step < max(cursor.step, cursor.tried) for step in rewinds[cursor.rewinds :]):
        # No tracker takes steps back: the new history is a run of its own there, with the steps before.
        cursor.history, cursor.step, cursor.tried, cursor.evaluated = len(rewinds) + 1, 0, 0, []
    cursor.rewinds = len(rewinds)
    return cursor


class TrackerFailed(HoldfastError):
    """A tracker, or the connection to it, failed. The metrics that it lacks are in `metrics.jsonl`."""


class Sending:
    """Sends one run to one tracker; `step` is the last step that the tracker has. Raise RunDirError if another process
    sends it there; ConfigError if the tracker is unknown."""

    def __init__(self, run_dir: RunDir, name: str, config: TrackingConfig) -> None:
        self._run_dir, self._name, self._config = run_dir, name, config
        self._class = load_tracker(name, key="tracking.backends")
        self._cursor = take_cursor(run_dir, name)
        self._text: TextOf | None = None
        self.step = 0

    def send(self, is_over: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> None:
        """Send old and new metrics until `is_over`; return when the tracker has all of them. Raise TrackerFailed for
        whatever the tracker raised."""
        try:
            self._tracker = self._class()
            # In this order: a later process tells of an attempt that begins in between.
            attempt = self._run_dir.next_attempt() - 1
            self.step = self._tracker.begin(self._tracked_run(attempt), after=self._cursor.step)
            if self._tracker.begins_anew:
                self._cursor.evaluated, self._cursor.alerted = [], {}
            try:
                self._follow(Evaluations(self._run_dir, attempt), is_over, wait)
            finally:
                self._tracker.close()
        except Exception as error:  # whatever a library raises, training does not depend on it
            raise TrackerFailed(f"{self._name}: {type(error).__name__}: {error}") from error
        self._note()

    def _follow(self, evaluations: Evaluations, is_over: Callable[[], bool], wait: Callable[[float], None]) -> None:
        lines = Tail(self._run_dir.metrics)
        events, alarms = EventLog(self._run_dir), Counter[str]()
        while True:
            over = is_over()  # before the look: the next look sees what comes in between
            steps = new_steps(lines)
            ended = evaluations.ended(self._cursor.evaluated)
            before, is_changed = self.step, False
            for attempt, event in events.new():
                if (alarm := alarm_of(event)) is None:
                    continue
                alarms[str(attempt)] += 1
                if alarms[str(attempt)] > self._cursor.alerted.get(str(attempt), 0):
                    self._tracker.alert(alarm.kind, alarm.text, step=alarm.step)
                    self._cursor.alerted[str(attempt)] = alarms[str(attempt)]
                    is_changed = True
            if steps and (last := steps[-1][0]) > max(self._cursor.tried, self.step):
                self._cursor.tried = last
                self._cursor.write(self._run_dir, self._name)
            for step, metrics in steps:
                if step > self.step:  # else a restarted trainer computed the step again, with the same result
                    if answers := self._answers(step):
                        self._tracker.log_answers(step, answers)
                    self._tracker.log(step, metrics)
                    self.step = step
                    is_changed |= self._send_evaluations(ended)
            is_last = over and not steps
            is_changed |= self._send_evaluations(ended, is_last=is_last)
            if self.step > before or is_changed:
                self._tracker.flush()
                self._note(is_changed=is_changed)
            if is_last:
                return
            if not steps:
                wait(_LOOK_S)

    def _answers(self, step: int) -> list[dict[str, Any]]:
        """Return a table of a few answers of a step; empty for most steps, or if the batch cannot be read any more."""
        every, place = self._config.answers_interval, self._run_dir.batch(step)
        if not every or step % every or not place.is_dir():
            return []
        self._text = self._text or text_of(self._run_dir)
        try:
            found = spread(list(read_answers([place], self._text)), _ANSWERS)
        except (HoldfastError, OSError) as error:  # it is damaged, or the trainer has just removed it
            _log.warning("the answers of step %d are not sent: %s", step, error)
            return []
        rows = [{name: one.value(name) for name in _COLUMNS} | {"parts": shown_parts(one)} for one in found]
        return [
            row | dict(zip(("prompt", "answer"), one.texts(), strict=True))
            for row, one in zip(rows, found, strict=True)
        ]

    def _send_evaluations(self, ended: dict[int, dict[str, float]], *, is_last: bool = False) -> bool:
        """Send the evaluations of steps that are sent, and take them off; return whether there were any."""
        due = [step for step in ended if step <= self.step]
        taken = [step for step in due if self._tracker.log_evaluation(step, ended[step], is_last=is_last)]
        for step in taken:
            del ended[step]
        self._cursor.evaluated += taken
        return bool(taken)

    def _note(self, *, is_changed: bool = False) -> None:
        if self.step != self._cursor.step or is_changed:
            self._cursor.step = self.step
            self._cursor.write(self._run_dir, self._name)

    def _tracked_run(self, attempt: int) -> TrackedRun:
        cursor, config, run_dir = self._cursor, self._config, self._run_dir
        name = config.name or run_dir.path.name
        return TrackedRun(
            id=cursor.tracked_id,
            history=cursor.history,
            name=name if cursor.history == 1 else f"{name} ({cursor.history})",
            project=config.project,
            tags=tuple(config.tags),
            directory=run_dir.path,
            settings=settings_of_attempt(run_dir, attempt),
            attempt=attempt,
            origin=run_dir.origin() if cursor.history == 1 else run_dir.run_id(),
        )


def new_steps(lines: Tail) -> list[tuple[int, dict[str, float]]]:
    """Return step and numbers of new lines of `metrics.jsonl`, some hundreds at most. Raise OSError if the file cannot
    be read."""
    found = list(islice(lines, _MAX_LINES))
    if lines.failure is not None:
        raise lines.failure
    steps = ((line.pop("step", None), line) for line in found)
    # A line without a step is damaged; the next resume sets it aside.
    return [(step, _numbers(line)) for step, line in steps if isinstance(step, int) and 0 < step < _MAX_STEPS]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}


class Evaluations:
    """Results of the evaluations beside a run of `sft` or `dpo`; none of other programs."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = run_dir
        self._are_beside = any((run_dir.configs(attempt) / f"{name}.toml").exists() for name in ("sft", "dpo"))
        self._read: dict[int, dict[str, float]] = {}

    def ended(self, sent: list[int]) -> dict[int, dict[str, float]]:
        """Return the numbers of evaluations that have ended and are not `sent`, by step, ascending."""
        from holdfast.orchestrator.evaluation.statistics import summary_in  # NumPy, which launchers do without

        for path in numbered_paths(self._run_dir.evaluations) if self._are_beside else []:
            step = number_of(path)
            if step in sent or step in self._read or not self._run_dir.is_evaluated(step):
                continue
            try:
                self._read[step] = _numbers(summary_in(path).metrics() | {"eval/version": float(step)})
            except DataError as error:
                _log.warning("an evaluation is not sent: %s", error)
                self._read[step] = {}
        return {step: metrics for step, metrics in sorted(self._read.items()) if metrics and step not in sent}
