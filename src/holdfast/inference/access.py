"""Guards the routes of the inference server: access rules, ownership by one run, decoding of bodies, error answers.

    reading, generating                     everyone who can connect
    what changes the server (`ADMIN`)       with the token, if one is set; JSON only; no page of a browser
    vLLM's own routes that change it        nobody: they are not part of this server

Access is checked before anything in a request is used. A loopback server is not safe from browsers on its machine: any
open page may send forms to the server, and may point its own name at 127.0.0.1. So a loopback server only answers
requests that are addressed to this machine by its own names. Admin routes refuse requests from a page of another
origin.

A server has at most one owner. A run owns a server from its first push of weights on, and the server then refuses
weights from anybody else. Ownership ends when the run gives the server back, or stays silent for a lease. Every request
with the run's id in the header `OWNER_HEADER` counts as a heartbeat. The same run may claim its server again at any
time. So may a new run in the same directory, since only one run can hold the directory. If a launcher starts a server
for its own run, the run owns the server for good, and both end together.
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
from holdfast.protocol.inference import (
    CLAIM_ROUTE,
    GENERATE_ROUTE,
    OWNED,
    PAUSE_ROUTE,
    RELEASE_ROUTE,
    RESUME_ROUTE,
    UPDATE_ROUTE,
    ErrorBody,
    ErrorCode,
    GenerateRequest,
    Owner,
    OwnerStatus,
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


class Ownership:
    """The owner of one server.

    Args:
        lease_s: how long a silent run owns the server.
        reserved: the run that the server was started for; None: it is for whoever comes.
        clock: seconds; a server that was frozen has not been able to hear anybody.
    """

    def __init__(self, lease_s: float, *, reserved: Owner | None = None, clock: Callable[[], float] = awake_s) -> None:
        self._lease_s = lease_s
        self._reserved = reserved
        self._clock = clock
        self._owner = reserved
        self._heard = clock()

    def status(self) -> OwnerStatus | None:
        """Return the owner, or None where there is none (any more)."""
        if self._owner is None:
            return None
        silent_s = self._clock() - self._heard
        if self._owner == self._reserved:
            return OwnerStatus(self._owner.run_id, self._owner.directory, silent_s, None)
        if silent_s > self._lease_s:
            return None
        return OwnerStatus(self._owner.run_id, self._owner.directory, silent_s, self._lease_s)

    def claim(self, owner: Owner | None) -> None:
        """Make `owner` the owner; None: somebody who needs no server for long, and may use one that nobody owns.

        Raises:
            RequestError: 409, the server is another's.
        """
        current = self.status()
        if current is not None and not _is_same(current, owner):
            raise RequestError(
                409,
                f"this server is owned by the run in {current.directory} (run {current.run_id}, last heard of "
                f"{current.silent_s:.0f} s ago), and {_free(current)}. Use another server, or stop that run.",
                code=OWNED,
            )
        # A reserved server stays its run's: whoever passes here is that run.
        if owner is not None and self._reserved is None:
            self._owner, self._heard = owner, self._clock()

    def renew(self, run_id: str) -> None:
        """Take note of a sign of life of run `run_id`."""
        # Even after the lease: nobody else has claimed it since.
        if self._owner is not None and self._owner.run_id == run_id:
            self._heard = self._clock()

    def release(self, owner: Owner) -> None:
        """Let `owner` go, if it is the owner."""
        if self._reserved is None and self._owner is not None and _is_same(self._owner, owner):
            self._owner = None


def _is_same(current: Owner | OwnerStatus, other: Owner | None) -> bool:
    """Whether `other` may have what is the `current` owner's: it is the same run, or the next one in its directory."""
    return other is not None and (other.run_id == current.run_id or other.directory == current.directory)


def _free(owner: OwnerStatus) -> str:
    if owner.lease_s is None:
        return "was started for that run alone"
    return f"is free when that run ends, or {owner.lease_s:g} s after its last sign of life"


_T = TypeVar("_T", bound=msgspec.Struct)


def decode_request(body: bytes) -> GenerateRequest:
    """Return the generate request in `body`.

    Raises:
        RequestError: 400, naming the unknown fields or the first wrong value.
    """
    try:
        return decode_body(body, GenerateRequest)
    except RequestError:
        known = GenerateRequest.__struct_fields__
        try:
            unknown = sorted(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(known))
        except (ValueError, RecursionError):  # the first error says more
            unknown = []
        if unknown:
            shown = ", ".join(unknown)
            raise RequestError(400, f"unknown fields: {shown:.500}. Allowed: {', '.join(known)}.") from None
        raise


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Return the `kind` in `body`.

    Raises:
        RequestError: 400, naming the first wrong value.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, str(error)) from None
    except (ValueError, RecursionError) as error:  # broken text, too
        raise RequestError(400, f"the body is not JSON: {error}") from None
