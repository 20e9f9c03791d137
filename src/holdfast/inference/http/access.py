"""Who may use which routes, looked at before anything of a request is used.

    reading, generating                     everyone who can connect
    what changes the server (`ADMIN`)       with the token, where one is set; JSON only; no page of a browser
    vLLM's own routes that change it        nobody: they are not part of this server

A server for this machine alone is not safe from browsers on it: any page that is open there may send it forms, and
may give its own name the address 127.0.0.1. So such a server answers only requests that are addressed to this machine
by its own names, and admin routes refuse what a page of another origin sent.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.shared.config.urls import names_this_machine
from holdfast.shared.wire.inference_api import (
    CLAIM_ROUTE,
    GENERATE_ROUTE,
    PAUSE_ROUTE,
    RELEASE_ROUTE,
    RESUME_ROUTE,
    UPDATE_ROUTE,
    ErrorBody,
)

ADMIN = frozenset({UPDATE_ROUTE, CLAIM_ROUTE, RELEASE_ROUTE, PAUSE_ROUTE, RESUME_ROUTE})
# Routes of vLLM that compute something and change nothing; what else it has for POST is its own administration.
_ASKING_THE_MODEL = re.compile(
    r"/(v[12]/(?!(load|unload)_lora_adapter$).+|invocations|pooling|classify|score|rerank|embed|generative_scoring)"
)
_OPEN = re.compile(rf"{_ASKING_THE_MODEL.pattern}|{GENERATE_ROUTE}|/(tokenize|detokenize|ping)")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def asks_the_model(method: str, path: str) -> bool:
    """Whether a request is for a route of vLLM whose answer depends on the weights."""
    return method == "POST" and _ASKING_THE_MODEL.fullmatch(path) is not None


class Gate:
    """Refuses requests by their first line, headers and length; what passes goes to `app`.

    Args:
        app: the application behind it.
        local: the server is for this machine alone.
        admin_token: what admin routes ask for; None: nothing.
        most_body_bytes: a longer body is not read.
    """

    def __init__(self, app: ASGIApp, *, local: bool, admin_token: str | None, most_body_bytes: int) -> None:
        self._app = app
        self._local = local
        self._expected = f"Bearer {admin_token}".encode() if admin_token else None
        self._most_body_bytes = most_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket" and (
            self._local and not names_this_machine(_headers(scope["headers"]).get("host", ""))
        ):
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], scope["path"], _headers(scope["headers"]))
        if refusal is not None:
            await _answer(send, *refusal)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return status and reason of the answer to a request that is not let through."""
        if self._local and not names_this_machine(headers.get("host", "")):
            return 403, "this server is for this machine alone: address it as 127.0.0.1, ::1 or localhost"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._most_body_bytes:
            return 413, f"the body has {length:.20} bytes, allowed are {self._most_body_bytes}"
        if method in _SAFE_METHODS or _OPEN.fullmatch(path):
            return None
        if path not in ADMIN:
            return 404, f"this server has no route {method} {path:.200}"
        if _is_from_a_page(headers):
            return 403, "pages of browsers may not use this route"
        if _has_body(headers) and not _is_json(headers.get("content-type", "")):
            return 415, "this route takes JSON: send it with the header 'Content-Type: application/json'"
        given = headers.get("authorization", "").encode("latin-1")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            return 401, "this route needs the header 'Authorization: Bearer <admin token>'"
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Receive no more than a body may have, whatever its header says."""
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._most_body_bytes:
                raise HTTPException(413, f"the body has more than {self._most_body_bytes} bytes")
            return message

        return counted


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}


def _is_from_a_page(headers: dict[str, str]) -> bool:
    """Whether a browser sent a request for a page: no other client says where it comes from."""
    return "origin" in headers or headers.get("sec-fetch-site", "none") != "none"


def _has_body(headers: dict[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


async def _answer(send: Send, status: int, reason: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(ErrorBody(reason))})
