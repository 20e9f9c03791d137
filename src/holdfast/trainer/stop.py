"""A request to stop that every rank sees: SIGTERM and SIGUSR1 ask for a save of the current step first.

Ranks are forked from one process, so a page of shared memory made before the fork carries the request:
whichever process a scheduler signals, all notice. Only ranks of one machine share it.
"""

from __future__ import annotations

import functools
import mmap
import signal
import struct
import time

_TIME = struct.Struct("d")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Which signal asked to stop, shared by the process that makes it and its forks."""

    @functools.cached_property
    def _memory(self) -> mmap.mmap:
        """The page, made by the process that listens and then forks the ranks; else by whoever asks first."""
        return mmap.mmap(-1, 1 + _TIME.size)

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 of this process and its forks as requests, instead of dying by them."""
        _ = self._memory  # now: a page that is made after the fork is not shared
        for number in SIGNALS:
            signal.signal(number, lambda received, _: self.ask(received))

    def ask(self, number: int) -> None:
        """Ask all ranks to stop, as signal `number` does."""
        # The first signal counts: the launcher measures the grace from it, too.
        if not self._memory[0]:
            _TIME.pack_into(self._memory, 1, time.monotonic())
        # After the time: who sees a number finds when it came.
        self._memory[0] = number

    def signal_number(self) -> int:
        """The signal that asked to stop; 0 when none did."""
        return self._memory[0]

    def asked_s(self) -> float:
        """When the first signal came, by the monotonic clock of this machine; now if none did here."""
        return _TIME.unpack_from(self._memory, 1)[0] if self._memory[0] else time.monotonic()


STOP_REQUEST = StopRequest()
"""The request of this process and its forks."""
