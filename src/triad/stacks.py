"""Where the threads of a process are, written into its log before it is killed for coming no further."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_SIGNAL = signal.SIGRTMIN + 3
_WAIT_S = 2.0
_LOOK_AGAIN_S = 0.02


def write_stacks_on_request() -> None:
    """From now on write to stderr what each thread does when `show_stacks` asks, also where none runs Python."""
    faulthandler.register(_SIGNAL, file=2)


def show_stacks(pids: Iterable[int], *, of: int, log: Path) -> None:
    """Ask processes for their stacks; return when the log grows, or soon: one that is stopped cannot answer.

    Args:
        pids: as they named themselves.
        of: their common ancestor, or one of them. Who is no child of it is no longer what it was, and left alone.
        log: where it lands.
    """
    size = _size(log)
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if of in (pid, *(parent.pid for parent in process.parents())):
                process.send_signal(_SIGNAL)
        except psutil.Error:
            continue
    deadline = time.monotonic() + _WAIT_S
    while _size(log) == size and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:  # it may lie where the storage is away
        return 0
