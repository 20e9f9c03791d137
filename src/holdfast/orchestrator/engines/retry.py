"""How long a client goes on asking a server that does not answer well: with growing pauses, and an end to them."""

from __future__ import annotations

import asyncio

from holdfast.orchestrator.engines.http import Unavailable
from holdfast.shared.errors import InferenceError
from holdfast.shared.process.clock import awake_s

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
# As often a server is asked again however long that took.
_ATTEMPTS = 5
# A server that asks for a longer pause is asked earlier, and may say it again.
_LONGEST_PAUSE_S = 60.0


class EngineLost(InferenceError):
    """A server was away, or failed, for longer than is waited for. Others may be there."""


class RetryPolicy:
    """How long one request goes on asking one server, or several that stand in for one another.

    Args:
        limit_s: how long they may fail in a row.
        key: dotted key of `limit_s`, for errors.
    """

    def __init__(self, limit_s: float, *, key: str) -> None:
        self._limit_s = limit_s
        self._key = key
        self._attempts = 0
        self._since = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    def count(self, failure: Unavailable, *, url: str) -> None:
        """Count a failed attempt, at the server at `url`.

        Raises:
            EngineLost: it failed often and for long enough.
        """
        self._attempts += 1
        # From the first failure on, not from the request: a slow answer is no failure.
        if self._attempts == 1:
            self._since = awake_s()
        failing_s = awake_s() - self._since
        if self._attempts >= _ATTEMPTS and failing_s >= min(self._limit_s, failure.retry_for_s):
            raise EngineLost(
                f"{url} was lost {self._attempts} times in a row within {failing_s:.0f} s ({self._key}): {failure}"
            )

    async def pause(self, failure: Unavailable) -> None:
        """Wait after a failed attempt: twice as long as the last time, and as long as the server asked for."""
        await asyncio.sleep(max(self._backoff_s, asked_pause_s(failure)))
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)


def asked_pause_s(failure: Unavailable) -> float:
    """Return for how many seconds a server that asked for it is left alone."""
    return min(failure.retry_after_s, _LONGEST_PAUSE_S)
