"""Phases of a process, told to whoever watches it.

The launcher names a file in the environment; every process of the run appends one JSON line per
phase. Without a launcher only the log line is left.
"""

from __future__ import annotations

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
    _log.info("%s%s", phase, f" ({details})" if details else "")
    path = os.environ.get(EVENTS_ENV)
    if path:
        append(path, os.environ.get(PROCESS_ENV, ""), phase, **fields)


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
