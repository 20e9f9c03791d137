"""Which tests were skipped when they ran last, and why: a file that every run brings up to date. Git ignores it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lanes.durations import ROOT, recorded, update

NAME = ".skipped.json"
FILE = ROOT / NAME
EXCUSED = {
    "this machine computes otherwise": "hardware: other processors round otherwise",
    "there is a GPU": "hardware: the test is of a machine without",
    "another night": "a part of the cases each night",
}
"""How the reasons begin that no installation removes. What else is missing, a machine of the nightly lane can have."""


def skipped(path: Path = FILE) -> dict[str, str]:
    """Return the reason by the name of each test that was skipped when it ran last, with its parameters."""
    return recorded(path)


def is_excused(reason: str) -> bool:
    """Whether a night need not try a test that says this."""
    return reason.startswith(tuple(EXCUSED))


def record(reasons: Mapping[str, str | None], path: Path = FILE) -> None:
    """Put reasons of tests into the file, None of those that were not skipped."""
    update(path, reasons, lambda _, reason: bool(reason))


class Skips:
    """A plugin of pytest that records which tests were skipped."""

    def __init__(self, path: Path = FILE) -> None:
        self._path = path
        self._reasons: dict[str, str | None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reasons.setdefault(report.nodeid, None)
        if report.skipped and isinstance(report.longrepr, tuple | list):
            self._reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self) -> None:
        record(self._reasons, self._path)
