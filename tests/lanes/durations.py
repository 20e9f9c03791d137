"""How long tests take: `.durations.json`, which every run writes and the next one orders by; and the bound of the
everyday lane."""

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.marks import EVERYDAY

ROOT = Path(__file__).resolve().parents[2]
NAME = ".durations.json"
FILE = ROOT / NAME
BOUND_S = 10.0
"""The longest test of the everyday lane."""
COMMAND_BOUND_S = 30.0
"""The longest of the few that run real commands every day, by the mark `everyday`."""


def recorded(path: Path = FILE) -> dict[str, Any]:
    """Return the seconds of tests by name; nothing if no run has written a file yet, or a power cut has emptied it."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def update(path: Path, values: Mapping[str, Any], is_kept: Callable[[str, Any], bool]) -> None:
    """Put values of tests into a file; tests that did not run keep theirs. Several processes may do so."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        written = path.with_suffix(f".{os.getpid()}")
        kept = {name: value for name, value in {**recorded(path), **values}.items() if is_kept(name, value)}
        written.write_text(json.dumps(kept, indent=0, sort_keys=True))
        written.replace(path)


def record(seconds: Mapping[str, float], path: Path = FILE) -> None:
    """Put seconds of tests into the file. Tests of files that are not there, below its directory, are left out."""
    is_there = cache(lambda file: (path.parent / file).exists())
    update(path, seconds, lambda name, _: is_there(name.partition("::")[0]))


def seconds_of_files(seconds: Mapping[str, float]) -> dict[str, float]:
    files: dict[str, float] = defaultdict(float)
    for name, took in seconds.items():
        files[name.partition("::")[0]] += took
    return files


def slowest(seconds: Mapping[str, float], count: int) -> list[str]:
    ranked = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return [f"{took:8.2f} s  {name}" for name, took in ranked[:count]]


def too_long(seconds: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """Return a line for each test that has taken longer than its bound, with the ways out; a test has `BOUND_S`."""
    return [
        f"{name} took {took:.1f} s; a test of the everyday lane has {bounds.get(name, BOUND_S):g} s. Make it quicker, "
        "or mark the resource that it needs (engine, launch, ranks, docs, clock) for the nightly lane"
        for name, took in seconds.items()
        if took > bounds.get(name, BOUND_S)
    ]


class Durations:
    """A plugin of pytest that records durations, and says which everyday tests have taken too long. It fails nothing:
    beside other work every test takes longer. `python -m tests.lanes bound` does, with one at a time. `everyday`:
    whether the session is one of the everyday lane; other sessions have no bound. `path`: the file of durations."""

    def __init__(self, *, everyday: bool, path: Path = FILE) -> None:
        self._everyday = everyday
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._bounds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if EVERYDAY in report.keywords:
            self._bounds[report.nodeid] = COMMAND_BOUND_S

    def pytest_sessionfinish(self) -> None:
        record(self._seconds, self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in too_long(self._seconds, self._bounds) if self._everyday else ():
            terminalreporter.write_line(f"warning: {line}", yellow=True)
