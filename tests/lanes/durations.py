"""How long tests take: a file that every run writes and the next run orders by, and the bound of the everyday lane.

The file, `.durations.json`, holds the seconds of each test by its name, setup and teardown included. Git ignores it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lanes.marks import lane_of

ROOT = Path(__file__).resolve().parents[2]
NAME = ".durations.json"
FILE = ROOT / NAME
BOUND_S = 10.0
"""The longest test of the everyday lane."""
_STALLS = Path("/proc/pressure/cpu")


def recorded(path: Path = FILE) -> dict[str, float]:
    """Return the seconds of tests by name; nothing if no run has written a file yet, or a power cut has emptied it."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def record(seconds: Mapping[str, float], path: Path = FILE) -> None:
    """Put seconds of tests into the file; tests that did not run keep theirs. Several processes may do so.

    Tests of files that are not below the directory of `path`, or no longer, are left out.
    """
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        written = path.with_suffix(f".{os.getpid()}")
        everything = {**recorded(path), **seconds}
        files = {file for name in everything if (path.parent / (file := name.partition("::")[0])).exists()}
        kept = {name: took for name, took in everything.items() if name.partition("::")[0] in files}
        written.write_text(json.dumps(kept, indent=0, sort_keys=True))
        written.replace(path)


def seconds_of_files(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each file of tests."""
    files: dict[str, float] = defaultdict(float)
    for name, took in seconds.items():
        files[name.partition("::")[0]] += took
    return files


def slowest(seconds: Mapping[str, float], count: int) -> list[str]:
    """Return a line for each of the slowest tests."""
    ranked = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return [f"{took:8.2f} s  {name}" for name, took in ranked[:count]]


def stalled_s() -> float:
    """Return for how many seconds a process of this machine has waited for a core; 0 if the kernel does not say."""
    try:
        some = _STALLS.read_text().split("\n")[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


class Durations:
    """A plugin of pytest that records durations and fails a session in which an everyday test takes too long.

    The bound is of a machine that has nothing else to do: seconds in which a process waited for a core do not count.

    Args:
        everyday: whether the session is one of the everyday lane; other sessions have no bound.
        path: the file of durations.
    """

    def __init__(self, *, everyday: bool, path: Path = FILE) -> None:
        self._everyday = everyday
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._stalled: dict[str, float] = {}
        self._too_long: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when a test begins."""
        self._stalled[nodeid] = stalled_s()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] += report.duration
        if report.when != "teardown" or not self._everyday or lane_of(report.keywords) != "everyday":
            return
        stalled = stalled_s() - self._stalled.get(report.nodeid, 0.0)
        if self._seconds[report.nodeid] - stalled > BOUND_S:
            self._too_long[report.nodeid] = self._seconds[report.nodeid]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file; fail if a test took too long."""
        record(self._seconds, self._path)
        if self._too_long and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which tests took too long."""
        for name, took in self._too_long.items():
            terminalreporter.write_line(
                f"error: {name} took {took:.1f} s; a test of the everyday lane has {BOUND_S:g} s. Make it quicker, or "
                "mark the resource that it needs (engine, launch, ranks, docs, clock) for the nightly lane",
                red=True,
            )
