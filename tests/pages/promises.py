"""Every promise of docs/guarantees.md with its tests and their lanes: `python -m tests.pages.promises [--tried]`. It
ends with 1 if a promise has no test, or one that pytest does not collect; with `--tried`, for the end of a night, also
if such a test was skipped when it ran last."""

import argparse
import contextlib
import io
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.lanes import skips
from tests.lanes.marks import BY_HAND, LANES, Lane, lane_of
from tests.pages import guarantees


@dataclass(frozen=True)
class Row:
    """One test of one promise; a promise without a test has none."""

    promise: str
    test: str
    lanes: tuple[Lane, ...]  # where the test runs; none if pytest does not collect it

    @property
    def is_by_hand(self) -> bool:
        """Whether no script of `.ci` runs it."""
        return bool(self.lanes) and not set(self.lanes) - BY_HAND.keys()


class _Collected:
    """A plugin of pytest that keeps the lanes of each test function and each file of tests."""

    def __init__(self) -> None:
        self.lanes: dict[str, set[Lane]] = defaultdict(set)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        lane, file = lane_of(mark.name for mark in item.iter_markers()), item.path.name
        for name in (file, f"{file}::{item.name.partition('[')[0]}"):
            self.lanes[name].add(lane)


def collected_lanes() -> dict[str, set[Lane]]:
    """Return the lanes of all tests, as pytest collects them, by `test_x.py::test_y` and by `test_x.py`. Raises
    `RuntimeError`: pytest could not collect them."""
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


def not_tried(rows: list[Row], skipped: Mapping[str, str]) -> list[str]:
    """Return a line for every promise with a test that was skipped for what a machine can have."""
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for name, reason in skipped.items():
        if not skips.is_excused(reason):
            path, _, test = name.partition("::")
            file = path.rpartition("/")[2]
            for known in (file, f"{file}::{test.partition('[')[0]}"):
                reasons[known][reason] = None
    return [f"not tried: {row.promise} ({row.test}: {'; '.join(reasons[row.test])})"
            for row in rows if row.test in reasons and not row.is_by_hand]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a promise has no test."""
    parser = argparse.ArgumentParser(prog="python -m tests.pages.promises")
    parser.add_argument("--tried", action="store_true", help="end with 1 if a test was skipped when it ran last")
    arguments = parser.parse_args(argv)
    rows = table(guarantees.PAGE.read_text(), collected_lanes())
    print("| promise | test | lane |\n|---|---|---|")
    for row in rows:
        lanes = ", ".join(f"by hand: `{BY_HAND[lane]}`" if lane in BY_HAND else lane for lane in row.lanes)
        print(f"| {row.promise.replace('|', '/')} | {row.test or '**none**'} | {lanes or '**none**'} |")
    without, by_hand = [row for row in rows if not row.lanes], [row for row in rows if row.is_by_hand]
    promises = {row.promise for row in rows}
    lines = not_tried(rows, skips.skipped()) if arguments.tried else []
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    counts = f"{len(promises)} promises, {len({row.test for row in rows})} tests"
    print(f"\n{counts}, {len(by_hand)} rows by hand, {len(without)} rows without a lane")
    return 1 if without or lines else 0


if __name__ == "__main__":
    sys.exit(main())
