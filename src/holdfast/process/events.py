"""Phases of a process, for the launcher.

The launcher names a file in the environment; every process of the run appends one JSON line per
phase. Without a launcher only the log line is left.
"""

import json
import logging
import os
import time

EVENTS_ENV = "HOLDFAST_EVENTS"
PROCESS_ENV = "HOLDFAST_PROCESS"

_log = logging.getLogger("holdfast")


def report(phase: str, **fields: object) -> None:
    """Say that this process entered `phase`, such as `loading vllm` or `ready`."""
    details = " ".join(f"{key}={value}" for key, value in fields.items())
    level = logging.WARNING if phase.startswith("WARNING") else logging.INFO
    _log.log(level, "%s%s", phase, f" ({details})" if details else "")
    path = os.environ.get(EVENTS_ENV)
    if path:
        append(path, os.environ.get(PROCESS_ENV, ""), phase, **fields)


_TELL_S = 2.0


class Counted:
    """Reports the progress of a phase and the time left every two seconds; short phases report nothing.

    Args:
        total: how many there are.
        unit: what is counted, such as `rows`.
        is_told: whether to report; ranks other than the first do not.
    """

    def __init__(self, phase: str, total: int, *, unit: str, is_told: bool = True) -> None:
        self._phase, self._total, self._unit, self._is_told = phase, total, unit, is_told
        self._done = 0
        self._begun = self._told = time.monotonic()

    def add(self, count: int = 1) -> None:
        """Count what is done since the last call."""
        self._done += count
        now = time.monotonic()
        if self._is_told and now - self._told >= _TELL_S and self._done:
            self._told = now
            left_s = (now - self._begun) / self._done * (self._total - self._done)
            report(self._phase, done=self._done, total=self._total, unit=self._unit, left_s=round(left_s, 1))


def append(path: str | os.PathLike[str], process: str, phase: str, /, **fields: object) -> None:
    """Append an event of `process` to the file `path`; say in the log where that fails."""
    event = {"time": time.time(), "process": process, "phase": phase, **fields}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # One write to a file opened with O_APPEND: lines of several processes never mix.
            os.write(descriptor, (json.dumps(event, default=str) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError as error:  # it is only shown: what matters will fail by itself
        _log.warning("not told to the launcher: %s", error)
