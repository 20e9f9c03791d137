"""Warnings about the data of a run: how many rows each is about, and which of them is the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError
from holdfast.process.events import report
from holdfast.run.rows import read_rows


class Remark(msgspec.Struct, frozen=True):
    """The rows that a warning is about.

    Attributes:
        count: how many rows.
        first: the first of them, such as `row 3`.
    """

    count: int
    first: str


Remarks = dict[str, Remark]
"""Warnings, each a text without name of the data, count and first row."""


def join(found: Iterable[Remarks]) -> Remarks:
    """Return the warnings of consecutive rows as one."""
    joined: Remarks = {}
    for remarks in found:
        for text, remark in remarks.items():
            before = joined.get(text)
            joined[text] = Remark(before.count + remark.count, before.first) if before else remark
    return joined


def lines_of(remarks: Remarks) -> list[str]:
    """Return each warning with its count and first row, for `tell`."""
    return [
        f"{text} ({remark.count:,} rows, the first: {remark.first})" if remark.count > 1 else f"{text} ({remark.first})"
        for text, remark in sorted(remarks.items())
    ]


def tell(lines: Sequence[str], config: SftDataConfig, *, is_told: bool) -> None:
    """Report warnings, which the console and the report of the run show. Raise DataError if there are warnings, and
    `data.strict` is set. `is_told`: whether they are reported; ranks other than the first do not."""
    if config.strict and lines:
        told = "\n       ".join(f"{config.name}: {line}" for line in lines)
        raise DataError(f"{told}\n       data.strict refuses such data: change the data, or take back data.strict.")
    for line in lines if is_told else ():
        report(f"WARNING: {config.name}: {line}")


def tell_samples(found: Iterable[tuple[str, int, int]], config: SftDataConfig, *, is_told: bool) -> None:
    """Do as `tell` with warnings about samples. Read the data again for the labels of rows, if there are warnings.
    `found`: for each warning its text, how many samples it is about, and the place of the first one's row."""
    there = [(text, count, place) for text, count, place in found if count]
    if not there or not (is_told or config.strict):
        return
    rows = read_rows(config.name, split=config.split)
    remarks = {
        text: Remark(count, next((where for where, _ in rows.take(place, place + 1)), f"row {place + 1}"))
        for text, count, place in there
    }
    tell(lines_of(remarks), config, is_told=is_told)
