"""Every promise of docs/guarantees.md with its tests and their lanes, as one table.

    uv run --group dev python -m tests.pages.promises

It ends with 1 if a promise has no test, or names a test that pytest does not collect.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import defaultdict
from dataclasses import dataclass

import pytest

from tests.lanes.marks import LANES, Lane, lane_of
from tests.pages import guarantees


@dataclass(frozen=True)
class Row:
    """One test of one promise; a promise without a test has none.

    Attributes:
        lanes: where the test runs; none if pytest does not collect it.
    """

    promise: str
    test: str
    lanes: tuple[Lane, ...]


class _Collected:
    """A plugin of pytest that keeps the lanes of each test function and each file of tests."""

    def __init__(self) -> None:
        self.lanes: dict[str, set[Lane]] = defaultdict(set)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        lane, file = lane_of(mark.name for mark in item.iter_markers()), item.path.name
        for name in (file, f"{file}::{item.name.partition('[')[0]}"):
            self.lanes[name].add(lane)


def collected_lanes() -> dict[str, set[Lane]]:
    """Return the lanes of all tests, as pytest collects them, by `test_x.py::test_y` and by `test_x.py`.

    Raises:
        RuntimeError: pytest could not collect them.
    """
    collected = _Collected()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = pytest.main(["--collect-only", "-q", "--lane", "all", "tests"], plugins=[collected])
    if code:
        raise RuntimeError(f"pytest could not collect the tests:\n{printed.getvalue()}")
    return collected.lanes


def table(page: str, lanes: dict[str, set[Lane]]) -> list[Row]:
    """Return a row for every test of every promise of a page, in the order of the page."""
    notes, rows = guarantees.footnotes(page), []
    for claim in guarantees.claims(page):
        promise = re.sub(r"\[\^[\w-]+\]", "", claim).strip("| ")
        tests = list(dict.fromkeys(guarantees.tests_of(claim, notes)))
        if not tests and not guarantees.is_not_tried(claim):
            rows.append(Row(promise, "", ()))
        rows += [Row(promise, test, tuple(lane for lane in LANES if lane in lanes.get(test, ()))) for test in tests]
    return rows


def main() -> int:
    """Print the table; return 1 if a promise has no test."""
    rows = table(guarantees.PAGE.read_text(), collected_lanes())
    print("| promise | test | lane |\n|---|---|---|")
    for row in rows:
        print(f"| {row.promise.replace('|', '/')} | {row.test or '**none**'} | {', '.join(row.lanes) or '**none**'} |")
    without = [row for row in rows if not row.lanes]
    promises = {row.promise for row in rows}
    print(f"\n{len(promises)} promises, {len({row.test for row in rows})} tests, {len(without)} rows without a lane")
    return 1 if without else 0


if __name__ == "__main__":
    sys.exit(main())
