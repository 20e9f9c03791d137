"""Data of a report: `metrics.jsonl` as columns of bounded length, and the charts that the page draws."""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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


# Okabe and Ito 2008, "Color Universal Design": told apart by who sees colours otherwise as well.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#B8A800", "#888888")


def colour_of(number: int) -> str:
    """Return the colour of the series of this number; they repeat."""
    return PALETTE[number % len(PALETTE)]


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        x, y: (P,) points.
        low, high: (P,) ends of an interval around each point, or None.
        dash: drawn dashed, beside another of the same colour.
        width: of the line, in pixels.
        shows_points: with a dot for each point.
    """

    name: str
    x: Numbers
    y: Numbers
    colour: str
    low: Numbers | None = None
    high: Numbers | None = None
    dash: Literal["solid", "dash", "dot", "dashdot"] = "solid"
    width: float = 1.6
    shows_points: bool = False


@dataclass(frozen=True)
class Mark:
    """A place on the x axis where something happened."""

    x: float
    text: str
    colour: str = PALETTE[-1]


@dataclass(frozen=True)
class Chart:
    """Curves over steps, or a stack of them.

    Attributes:
        key: names the chart in the page and the picture's file.
        unit: of the y axis.
        is_stack: the series are parts of a whole: drawn one on the other.
        note: what a reader must know to read it right.
        top: where the y axis ends; None: as high as the curves go.
    """

    key: str
    title: str
    unit: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)
    is_stack: bool = False
    note: str = ""
    top: float | None = None


@dataclass(frozen=True)
class Block:
    """A stretch of a lane of a timeline; Unix seconds."""

    lane: str
    name: str
    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class Lanes:
    """What every process did when.

    Attributes:
        names: of the lanes, from top to bottom.
        colours: by name of a block.
    """

    key: str
    title: str
    names: list[str]
    blocks: list[Block]
    colours: dict[str, str]
    marks: list[Mark] = field(default_factory=list)
    note: str = ""


def points(values: list[float]) -> Numbers:
    """Return an array of some numbers."""
    return np.array(values, dtype=np.float64)
