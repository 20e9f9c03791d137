"""The lines of `metrics.jsonl` as trackers get them, also while resumes replace the file."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.commands.live.tails import Tail

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
