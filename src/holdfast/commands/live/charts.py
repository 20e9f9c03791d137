"""Bars and curves of one line of text, in the characters that a terminal can show."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """Characters to draw with.

    Attributes:
        done, left: of a bar.
        levels: of a curve, from the lowest to the highest.
        rule: of a line across the screen.
        gap: between two things on one line.
        cut: behind what was cut off.
    """

    done: str
    left: str
    levels: str
    rule: str
    gap: str
    cut: str
    is_ascii: bool = False


UNICODE = Glyphs("━", "─", "▁▂▃▄▅▆▇█", "─", " · ", "…")
ASCII = Glyphs("#", "-", "_.-=+*#@", "-", " | ", "~", is_ascii=True)


def glyphs_for(encoding: str | None, environment: Mapping[str, str] = os.environ) -> Glyphs:
    """Return what a stream of `encoding` can take in the locale that the user has set.

    Python itself makes UTF-8 of the locale C, and says so in LC_CTYPE; who chose C gets ASCII for all that.
    """
    is_utf8 = (encoding or "").lower().replace("-", "") == "utf8"
    given = environment.get("LANG") or "C"
    ctype = environment.get("LC_CTYPE") or given
    if ctype == "C.UTF-8" and given in ("C", "POSIX"):
        ctype = given
    locale = environment.get("LC_ALL") or ctype
    return UNICODE if is_utf8 and "utf8" in locale.lower().replace("-", "") else ASCII


def bar(share: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return the part of a bar of `width` that is done, and the part that is left."""
    done = int(max(0.0, min(1.0, share)) * width)
    return glyphs.done * done, glyphs.left * (width - done)


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """Return the course of `values` in at most `width` characters, each the mean of as many values as the others.

    The lowest of these means is drawn lowest, the highest highest; where all are equal, in the middle.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [round(number * len(values) / count) for number in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    if not high > low:
        return glyphs.levels[len(glyphs.levels) // 2] * count
    last = len(glyphs.levels) - 1
    return "".join(glyphs.levels[round(last * (mean - low) / (high - low))] for mean in means)
