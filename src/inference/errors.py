"""Errors that become HTTP answers."""

from __future__ import annotations


class RequestError(Exception):
    """A request that gets a status and a reason instead of an answer; the server goes on."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
