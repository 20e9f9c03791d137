"""`metrics.jsonl` as columns, and curves of at most so many points."""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 1000
# Up to here every whole number is a float of its own.
_MOST_STEPS = 2**53

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The metrics of a run.

    Attributes:
        steps: (N,) optimizer steps, ascending, each once.
        values: by name, (N,); NaN where a step has no such number.
        nulls: by name, how many values were no finite numbers (null in the file).
        damaged: lines that could not be read, but for a last one that is being written.
    """

    steps: Numbers = field(default_factory=lambda: np.empty(0))
    values: dict[str, Numbers] = field(default_factory=dict)
    nulls: dict[str, int] = field(default_factory=dict)
    damaged: int = 0

    def curve(self, name: str) -> tuple[Numbers, Numbers]:
        """Return the steps and values of a metric where it is a number."""
        values = self.values[name]
        known = np.isfinite(values)
        return self.steps[known], values[known]


def read_columns(path: Path) -> Columns:
    """Return what a `metrics.jsonl` says; nothing where there is none. Holds 8 bytes a number, not the file.

    Raises:
        OSError: it cannot be read.
    """
    steps: array[float] = array("d")
    values: dict[str, array[float]] = {}
    nulls: dict[str, int] = {}
    damaged = 0
    if not path.exists():
        return Columns()
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # being written, or its writer was killed
            try:
                found = msgspec.json.decode(line, type=dict[str, float | None])
                steps.append(_finite(found.pop("step")))
            except (msgspec.DecodeError, KeyError, ValueError):
                damaged += 1
                continue
            for name, value in found.items():
                column = values.setdefault(name, array("d"))
                column.extend([math.nan] * (len(steps) - 1 - len(column)))
                column.append(math.nan if value is None else value)
                if value is None:
                    nulls[name] = nulls.get(name, 0) + 1
    for column in values.values():
        column.extend([math.nan] * (len(steps) - len(column)))
    # The last line of a step counts: the run went back to before it.
    order, last = np.unique(np.array(steps)[::-1], return_index=True)
    kept = len(steps) - 1 - last
    return Columns(order, {name: np.array(column)[kept] for name, column in values.items()}, nulls, damaged)


def _finite(step: float | None) -> float:
    if step is None or not 0 <= step < _MOST_STEPS:
        raise ValueError("a line without a step")
    return step


def thin_out(x: Numbers, y: Numbers, *, limit: int = MAX_POINTS) -> tuple[Numbers, Numbers]:
    """Return at most `limit` points of a curve: the least and the greatest of each stretch of it, in their order.

    So no spike is lost, whatever is left out. The first and the last point stay.
    """
    if len(x) <= limit:
        return x, y
    edges = np.linspace(1, len(x) - 1, (limit - 2) // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in itertools.pairwise(edges):
        part = y[begin:end]
        kept |= {begin + int(part.argmin()), begin + int(part.argmax())}
    indices = np.array(sorted(kept))
    return x[indices], y[indices]


def means_of_stretches(x: Numbers, columns: list[Numbers], *, limit: int) -> tuple[Numbers, list[Numbers], int]:
    """Return means of columns, (N,) each, over stretches of equally many points, such that few are left.

    Returns:
        The first x of every stretch, the means, and how many points a stretch has.
    """
    size = max(1, math.ceil(len(x) / limit))
    begins = np.arange(0, len(x), size)
    lengths = np.diff(np.append(begins, len(x)))
    return x[begins], [np.add.reduceat(column, begins) / lengths for column in columns], size
