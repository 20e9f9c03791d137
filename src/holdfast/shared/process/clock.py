"""A clock that stands still while this process is frozen, and one that counts the time in which there is work.

`docker pause`, SIGSTOP of everything, a suspended job: afterwards `time.monotonic` says that every deadline is over,
though nobody had the chance to meet one. `awake_s` leaves such times out. A process that only waits, or whose event
loop is blocked, is not frozen: a thread of it looks at the clock each second, and a look that comes much too late is
what tells a freeze.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_S = 5.0
"""A look at the clock so long after the one before means that the process was frozen between them."""
_TICK_S = 1.0


class _Clock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._awake_s = 0.0
        self._ticks = False

    def read(self) -> float:
        with self._lock:
            if not self._ticks:
                self._ticks = True
                threading.Thread(target=self._tick, name="clock", daemon=True).start()
                self._looked = time.monotonic()
            now = time.monotonic()
            passed = now - self._looked
            if 0 < passed < FROZEN_S:
                self._awake_s += passed
            self._looked = now
            return self._awake_s

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self.read()


_clock = _Clock()


def awake_s() -> float:
    """Return seconds for measuring spans of time, as `time.monotonic` does, without those in which we were frozen."""
    return _clock.read()


def _begin_anew() -> None:
    global _clock
    _clock = _Clock()  # a fork has no threads, and perhaps a lock that one of them held


os.register_at_fork(after_in_child=_begin_anew)


class BusyClock:
    """Counts the seconds in which at least one of several overlapping pieces of work goes on. For one thread.

    Attributes:
        in_flight: how many go on now.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._busy_s = 0.0
        self._since = 0.0

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count a piece of work while the block runs."""
        if self.in_flight == 0:
            self._since = time.monotonic()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._busy_s += time.monotonic() - self._since

    @property
    def busy_s(self) -> float:
        """Seconds so far."""
        return self._busy_s + (time.monotonic() - self._since if self.in_flight else 0.0)


class FreezeTolerantLoop(asyncio.SelectorEventLoop):
    """An event loop whose deadlines stand still while the process is frozen: nobody could have met them."""

    def time(self) -> float:
        """Return the time that `call_later` and `asyncio.timeout` go by."""
        return awake_s()
