"""How long the steps that are left will take."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

RECENT_STEPS = 50
# A step that waited for the start of an engine, or for a process to come back, says nothing of those to come.
_MOST_OF_MEDIAN = 5.0


class TimeLeft:
    """How long the steps that are left will take, if they take as long as the last ones did by the wall clock."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS + 1)
        # What one that was not seen may have taken, until one was seen.
        self._unseen_s: float | None = None

    def begin_with(
        self, steps: Iterable[tuple[int, float | None]], *, max_steps: int | None, now: float
    ) -> float | None:
        """Begin with steps whose ends nobody saw, each with the seconds that it says it took; return as `after`."""
        self._ends.clear()
        self._unseen_s = None
        recent = [(step, seconds or 0.0) for step, seconds in steps][-RECENT_STEPS:]
        if not recent:
            return None
        limit = _MOST_OF_MEDIAN * statistics.median(seconds for _, seconds in recent)
        ends = [(step, min(seconds, limit)) for step, seconds in recent]
        moment = now - sum(seconds for _, seconds in ends[1:])
        left_s = self.after(ends[0][0], max_steps=max_steps, now=moment, step_s=ends[0][1] or None)
        for step, seconds in ends[1:]:
            moment += seconds
            left_s = self.after(step, max_steps=max_steps, now=moment, step_s=seconds or None)
        self._unseen_s = limit or math.inf
        return left_s

    def after(self, step: int, *, max_steps: int | None, now: float, step_s: float | None = None) -> float | None:
        """Return the seconds left after `step`, which was seen to end at `now`; None where nothing can be said.

        Args:
            max_steps: that the run trains until; None where that is not known.
            step_s: how long the step says that it took itself; all there is to go by after the first.
        """
        if self._ends and step <= self._ends[-1][1]:  # the run went back to a checkpoint
            self._ends.clear()
        if self._ends and self._unseen_s is not None:
            # The processes may have been started since: only what the step itself took counts.
            waited_s = now - self._ends[-1][0]
            start_s = waited_s - min(waited_s, step_s or math.inf, self._unseen_s)
            self._ends = deque(((end + start_s, number) for end, number in self._ends), maxlen=self._ends.maxlen)
        self._unseen_s = None
        self._ends.append((now, step))
        first, first_step = self._ends[0]
        mean = (now - first) / (step - first_step) if step > first_step and now > first else step_s
        return None if mean is None or max_steps is None else mean * max(0, max_steps - step)


def duration(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:07:20`; clocks that went back give `0:00`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
