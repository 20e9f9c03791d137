"""What the charts of a report show, apart from who draws them: the page (plotly) and the pictures (matplotlib)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from holdfast.commands.report.columns import Numbers

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
