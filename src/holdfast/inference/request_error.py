"""The error that becomes an HTTP answer."""

from __future__ import annotations

from typing import Literal

from holdfast.shared.wire.inference_api import ErrorCode


class RequestError(Exception):
    """A request that gets a status and a reason instead of an answer; the server goes on.

    Args:
        status: of HTTP.
        reason: for people.
        code: for programs, where they can do something about it.
    """

    def __init__(self, status: int, reason: str, *, code: ErrorCode | Literal[""] = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code
