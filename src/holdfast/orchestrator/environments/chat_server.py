"""The server at which harnesses ask for what the policy says: one for an event loop, on a port of this machine.

    POST /<rollout>/v1/chat/completions     one turn of the rollout
    GET  /<rollout>/v1/models               the one model there is

Every rollout has an address of its own while it is played. The server begins with the first rollout of its process and
ends with the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import uvicorn

from holdfast.orchestrator.environments.chat_protocol import Refused
from holdfast.shared.errors import HoldfastError

_log = logging.getLogger("orchestrator")

MODEL = "policy"
_PATH = re.compile(r"/(\d+)/v1/(chat/completions|models)")
_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class Answering(Protocol):
    """What answers the requests of one rollout."""

    async def answer(self, body: bytes, *, is_retry: bool) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            Refused: there is none; says why.
            HoldfastError: what samples has failed.
        """
        ...


class ChatServer:
    """Sends the requests of harnesses to the rollouts that they are of.

    Attributes:
        api_key: without it nothing is answered: others on this machine have no business here.
    """

    def __init__(self) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self._numbers = itertools.count(1)
        self._rollouts: dict[int, Answering] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)

    @contextlib.contextmanager
    def serving(self, rollout: Answering) -> Iterator[str]:
        """Answer the requests of a rollout meanwhile, at the base URL that this gives."""
        number = next(self._numbers)
        self._rollouts[number] = rollout
        try:
            yield f"http://127.0.0.1:{self._socket.getsockname()[1]}/{number}/v1"
        finally:
            del self._rollouts[number]

    async def live(self, is_up: asyncio.Future[None]) -> None:
        """Serve until this is cancelled."""
        config = uvicorn.Config(
            self._application, interface="asgi3", proxy_headers=False, lifespan="off", ws="none",
            access_log=False, log_config=None, log_level="warning", timeout_keep_alive=120, timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = _Server(config, is_up)
        try:
            await server.serve(sockets=[self._socket])
        finally:
            await server.shutdown(sockets=[self._socket])

    async def _application(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        status, answer = await self._answer(scope, receive)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status != 200:
            headers.append((b"x-should-retry", b"false"))  # OpenAI's clients heed it
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: dict[str, Any], receive: _Receive) -> tuple[int, dict[str, Any]]:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not secrets.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.api_key}".encode()):
            return 401, _error("the API key is not that of the endpoint", code="invalid_api_key")
        path = _PATH.fullmatch(scope["path"])
        rollout = self._rollouts.get(int(path[1])) if path else None
        if path is None or rollout is None:
            _log.warning("a harness asks for %s, where no rollout is played", scope["path"][:200])
            return 404, _error(
                f"there is no rollout at {scope['path'][:200]}: it has ended, or that is not the base URL it was given "
                "with /chat/completions behind it"
            )
        wanted = "POST" if path[2] == "chat/completions" else "GET"
        if scope["method"] != wanted:
            return 405, _error(f"{path[2]} is asked by {wanted}, not {scope['method']}")
        if wanted == "GET":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}]}
        body = await _read(receive)
        try:
            return 200, await rollout.answer(body, is_retry=headers.get("x-stainless-retry-count", "0") != "0")
        except Refused as refusal:
            return 400, _error(str(refusal), code=refusal.code or refusal.reason)
        except HoldfastError as error:
            return 500, _error(f"the policy cannot be sampled: {error}", kind="server_error")


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which are the process's own."""

    def __init__(self, config: uvicorn.Config, is_up: asyncio.Future[None]) -> None:
        super().__init__(config)
        self._is_up = is_up

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets=sockets)
        self._is_up.set_result(None)


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[ChatServer, asyncio.Task[None], asyncio.Future[None]]] = (
    WeakKeyDictionary()
)


async def chat_server() -> ChatServer:
    """Return the server of this event loop, which is there."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        server = ChatServer()
        is_up: asyncio.Future[None] = loop.create_future()
        # In a context of its own: whatever plays the first rollout has nothing to do with those of others.
        serving = contextvars.Context().run(loop.create_task, server.live(is_up))
        _SERVERS[loop] = server, serving, is_up
    server, _, is_up = _SERVERS[loop]
    await asyncio.shield(is_up)
    return server


def _error(message: str, *, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def _read(receive: _Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
