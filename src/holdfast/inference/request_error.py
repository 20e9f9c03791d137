"""Errors that become HTTP answers."""

from __future__ import annotations


class RequestError(Exception):
    """A request that gets a status and a reason instead of an answer; the server goes on.

    Args:
        status: of HTTP.
        reason: for people.
        code: for programs, where they can do something about it: `owned`, `other_weights`.
    """

    def __init__(self, status: int, reason: str, *, code: str | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code
