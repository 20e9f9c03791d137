"""Which dead processes are started again, how often, and after which delay."""

from __future__ import annotations

import time
from collections import defaultdict, deque

from holdfast.shared.errors import NOT_SAVED

_FIRST_DELAY_S = 0.2
_LAST_DELAY_S = 10.0
# Exit codes of errors that were told: they would only come again.
_TOLD = (2, 3, NOT_SAVED)


class Restarts:
    """The allowance of every process: at most `limit` restarts within `window_s` seconds.

    Args:
        limit: 0: none is ever started again.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._failures: dict[str, tuple[str | None, int]] = {}
        self._stuck: dict[str, tuple[int, int]] = {}

    def comes_again(self, name: str, failure: str | None, *, step: int) -> bool:
        """Note a death of process `name`; return whether it died of the same `failure` before, at the same step.

        Args:
            failure: None where nothing but the death itself is known: it then counts as another one.
        """
        before, self._failures[name] = self._failures.get(name), (failure, step)
        return failure is not None and before == (failure, step)

    def delay_s(self, name: str, exit_code: int, *, stuck_at: int | None = None) -> float | None:
        """Return the seconds to wait before process `name` is started again; None: it is not.

        Deaths by a signal, crashes and a dead engine are worth another try. Errors that were told (bad input,
        numbers that broke) would only come again. A storage that failed is no crash: see `storage_backoff`.

        Args:
            stuck_at: the step at which it came no further. That takes longer to notice than any window, so it may
                be started again `limit` times at the same step.
        """
        if exit_code in _TOLD:
            return None
        if stuck_at is not None:
            step, count = self._stuck.get(name, (stuck_at, 0))
            count = count if step == stuck_at else 0
            if count >= self.limit:
                return None
            self._stuck[name] = (stuck_at, count + 1)
            return _FIRST_DELAY_S
        self._stuck.pop(name, None)
        now = time.monotonic()
        times = self._times[name]
        while times and now - times[0] > self.window_s:
            times.popleft()
        if len(times) >= self.limit:
            return None
        times.append(now)
        return min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** (len(times) - 1))

    def used(self, name: str) -> int:
        """Restarts of `name` within the window, or at the step at which it is stuck."""
        return self._stuck[name][1] if name in self._stuck else len(self._times[name])

    def over(self, name: str) -> str:
        """Return what those of `used` were counted over."""
        return f" behind step {self._stuck[name][0]}" if name in self._stuck else f" in {self.window_s:g} s"
