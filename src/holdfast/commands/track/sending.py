"""Sending the steps of one run to one tracker, from where it was left, until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.commands.track.alarms import Alarms
from holdfast.commands.track.cursor import Cursor
from holdfast.commands.track.evaluations import Evaluations
from holdfast.commands.track.lines import Lines
from holdfast.commands.track.settings import settings_of_attempt
from holdfast.commands.track.trackers import TrackedRun, Tracker, load_tracker
from holdfast.shared.config.tracking import TrackingConfig
from holdfast.shared.errors import HoldfastError
from holdfast.shared.files.run_dir import RunDir

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
