"""Sending the steps of one run to one tracker, from where it was left, until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.commands.track.cursor import Cursor
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
            before = self.step
            for step, metrics in steps:
                if step > self.step:  # else it is trained again after a restart: with the same result
                    tracker.log(step, metrics)
                    self.step = step
            if self.step > before:
                tracker.flush()
                self._note()
            if over and not steps:
                return
            if not steps:
                wait(LOOK_S)

    def _note(self) -> None:
        """Note how far the tracker has come."""
        if self.step != self._cursor.step:
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
