"""Guards the routes of the inference server: access rules, ownership by one run, decoding of bodies, error answers.

    routes that read or generate            everyone who can connect
    routes that change the server (ADMIN)   with the token, if one is set; JSON only; no page of a browser
    other routes of vLLM                    nobody

Any page that is open in a browser may send forms to a loopback server, and may point its own name at 127.0.0.1. A
loopback server only answers requests that are addressed to this machine by its own names, and admin routes refuse
requests from a page.

A server has at most one owner. A run owns a server from its first push of weights on, and the server then refuses
weights from other runs. Ownership ends when the run gives the server back, or is silent for a lease. Every request
with the run's id in the header `OWNER_HEADER` counts as a heartbeat. The same run, or a new run in the same directory,
may claim the server again at any time. A server that a launcher starts for its own run belongs to that run for good.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.config.base import names_this_machine
from holdfast.process.heartbeat import awake_s
from holdfast.protocol import inference as api

ADMIN = frozenset({api.UPDATE_ROUTE, api.CLAIM_ROUTE, api.RELEASE_ROUTE})
# Routes of vLLM that compute something and change nothing; what else it has for POST is its own administration.
_ASKING_THE_MODEL = re.compile(
    r"/(v[12]/(?!(load|unload)_lora_adapter$).+|invocations|pooling|classify|score|rerank|embed|generative_scoring)"
)
_OPEN = re.compile(rf"{_ASKING_THE_MODEL.pattern}|{api.GENERATE_ROUTE}|/(tokenize|detokenize|ping)")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def asks_the_model(method: str, path: str) -> bool:
    """Whether a request is for a route of vLLM whose answer depends on the weights."""
    return method == "POST" and _ASKING_THE_MODEL.fullmatch(path) is not None


class Gate:
    """Refuses requests by their first line, headers and length; `local`: the server is for this machine only."""

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
            await _answer(send, scope["path"], *refusal)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return status and reason if the request is refused."""
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
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and content_type != "application/json":
            return 415, "this route takes JSON: send it with the header 'Content-Type: application/json'"
        given = headers.get("authorization", "").encode("latin-1")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            return 401, "this route needs the header 'Authorization: Bearer <admin token>'"
        return None

    def _bounded(self, receive: Receive) -> Receive:
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


async def _answer(send: Send, path: str, status: int, reason: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    body: object = api.ErrorBody(reason)
    if _ASKING_THE_MODEL.fullmatch(path):
        body = openai_error(status, reason)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})


def openai_error(status: int, reason: str) -> dict[str, object]:
    """Return an error in the form of vLLM's OpenAI routes, whose clients read `error.message`."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": reason, "type": kind, "param": None, "code": status}}


class RequestError(Exception):
    """A request that gets an HTTP status and a reason instead of an answer; `code` is for programs."""

    def __init__(self, status: int, reason: str, *, code: api.ErrorCode | Literal[""] = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code


class Ownership:
    """The owner of one server, for a lease, or for good if the server was started for the run `reserved`."""

    def __init__(
        self, lease_s: float, *, reserved: api.Owner | None = None, clock: Callable[[], float] = awake_s
    ) -> None:
        self._lease_s = lease_s
        self._reserved = reserved
        self._clock = clock
        self._owner = reserved
        self._heard = clock()

    def status(self) -> api.OwnerStatus | None:
        """Return the owner, or None."""
        if self._owner is None:
            return None
        silent_s = self._clock() - self._heard
        if self._owner == self._reserved:
            return api.OwnerStatus(self._owner.run_id, self._owner.directory, silent_s, None)
        if silent_s > self._lease_s:
            return None
        return api.OwnerStatus(self._owner.run_id, self._owner.directory, silent_s, self._lease_s)

    def claim(self, owner: api.Owner | None) -> None:
        """Make `owner` the owner; None only asks if the server is free. Raise RequestError (409) if it is not."""
        current = self.status()
        if current is not None and not _is_same(current, owner):
            until = "was started for that run alone"
            if current.lease_s is not None:
                until = f"is free when that run ends, or {current.lease_s:g} s after its last heartbeat"
            raise RequestError(
                409,
                f"this server is owned by the run in {current.directory} (run {current.run_id}, last heard of "
                f"{current.silent_s:.0f} s ago), and {until}. Use another server, or stop that run.",
                code=api.OWNED,
            )
        if owner is not None and self._reserved is None:
            self._owner, self._heard = owner, self._clock()

    def renew(self, run_id: str) -> None:
        """Count a heartbeat of run `run_id`, even after its lease, if no other run has claimed the server."""
        if self._owner is not None and self._owner.run_id == run_id:
            self._heard = self._clock()

    def release(self, owner: api.Owner) -> None:
        """End the ownership of `owner`, if it is the owner."""
        if self._reserved is None and self._owner is not None and _is_same(self._owner, owner):
            self._owner = None


def _is_same(current: api.Owner | api.OwnerStatus, other: api.Owner | None) -> bool:
    """Whether `other` is the same run, or the next run in its directory."""
    return other is not None and (other.run_id == current.run_id or other.directory == current.directory)


_T = TypeVar("_T", bound=msgspec.Struct)


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Return the `kind` in `body`. Raise RequestError (400) that names the first wrong value or field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"{error!s:.500}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
