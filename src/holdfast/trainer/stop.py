"""A request to stop, by a signal, that all ranks of a machine see: they save the current step first.

Ranks are forked from one process, so they share a page of memory. A scheduler may signal any of the processes.
"""

from __future__ import annotations

import functools
import mmap
import signal
import struct
import time

_TIME = struct.Struct("d")
SIGNALS = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGUSR2: signal.SIGINT}
"""The signal that ranks act on, by the signal that comes. They ignore SIGINT, which a terminal sends to all processes:
the launcher sends SIGUSR2 instead."""


class StopRequest:
    """The signal that asked to stop, shared by a process and its forks."""

    @functools.cached_property
    def _memory(self) -> mmap.mmap:
        return mmap.mmap(-1, 1 + _TIME.size)

    def listen(self) -> None:
        """Handle `SIGNALS` in this process and its forks. Call before the fork."""
        _ = self._memory
        for number in SIGNALS:
            signal.signal(number, lambda received, _: self.ask(SIGNALS[signal.Signals(received)]))

    def ask(self, number: int) -> None:
        """Ask all ranks to stop, as signal `number` does. The grace period counts from the first one except SIGINT."""
        if self._memory[0] in (0, signal.SIGINT):
            _TIME.pack_into(self._memory, 1, time.monotonic())
        elif number == signal.SIGINT:
            return  # somebody waits with a deadline
        self._memory[0] = number

    def signal_number(self) -> int:
        """Return the signal that asked to stop, or 0."""
        return self._memory[0]

    def asked_s(self) -> float:
        """Return the time of the first signal by the monotonic clock; without a signal, now."""
        return _TIME.unpack_from(self._memory, 1)[0] if self._memory[0] else time.monotonic()


STOP_REQUEST = StopRequest()
"""The request of this process and its forks."""
