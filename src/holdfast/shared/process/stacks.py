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
# Stacks are written piece by piece, the main thread's last; a busy machine interrupts that.
_QUIET_S = 0.5
_MOST_S = 10.0  # of all together
_LOOK_AGAIN_S = 0.02


def write_stacks_on_request() -> None:
    """From now on write to stderr what each thread does when `show_stacks` asks, also where none runs Python."""
    # Not signal.signal: a Python handler runs only when the main thread gets back to Python.
    faulthandler.register(_SIGNAL, file=2)


def show_stacks(pids: Iterable[int], *, of: int, log: Path) -> None:
    """Ask processes for their stacks; return when they are in the log, or soon: one may be unable to answer.

    One after the other: they write into one file, piece by piece.

    Args:
        pids: as they named themselves.
        of: their common ancestor, or one of them. Who is no child of it is no longer what it was, and left alone.
        log: where it lands.
    """
    deadline = time.monotonic() + _MOST_S
    for pid in pids:
        size = _size(log)
        try:
            process = psutil.Process(pid)
            is_child = of in (pid, *(parent.pid for parent in process.parents()))
            # A stopped process writes nothing until it goes on: not worth the wait.
            if not is_child or process.status() == psutil.STATUS_STOPPED:
                continue
            process.send_signal(_SIGNAL)
        except psutil.Error:
            continue
        _wait_for_growth(log, size, deadline)


def _wait_for_growth(log: Path, size: int, deadline: float) -> None:
    """Wait until a log has grown beyond `size` and grows no more."""
    last, changed = size, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (found := _size(log)) != last:
            last, changed = found, now
        if now > changed + (_QUIET_S if last != size else _WAIT_S):
            return
        time.sleep(_LOOK_AGAIN_S)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:  # it may lie where the storage is away
        return 0
