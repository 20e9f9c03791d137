"""The routes of the project, beside the OpenAI-compatible routes of vLLM.

    POST /inference/v1/generate   token ids in, token ids and log-probabilities out
    GET  /health                  a probe of the engine, not of the web server
    GET  /weights                 version and digest of the served weights, user of the server, owner
    POST /update_weights          replace the weights (admin); refused to all except the owner
    POST /claim, /release         own the server, and give it back (admin)

All other routes that read or generate, such as `/metrics`, are vLLM's. `inference.access` says who may use a route.
`holdfast.protocol.inference` defines bodies, answers and error codes. Every answer names the policy version that made
it.

`generate` asks the engine directly, without text or chat template. It samples one choice per seed, and every choice
says which weights sampled each span of its tokens.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.inference.access import Gate, Ownership, RequestError, asks_the_model, decode_body, openai_error
from holdfast.inference.weights import EngineWeights, ServerMetrics
from holdfast.protocol import inference as api
from holdfast.protocol.rollouts import list_packed

_OWNER_HEADER = api.OWNER_HEADER.encode()
# An engine that gave output this recently needs no probe.
_RECENT_S = 3.0
# The temperatures that vLLM uses as asked: it raises lower ones in silence, and refuses higher ones.
_MIN_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 2.0

_T = TypeVar("_T")
_Handler = Callable[[Request], Awaitable[Response]]


class SamplingEngine(Protocol):
    """An engine as the routes use it: `inference.engine.VllmSampler`, or the numpy engine of the tests.

    Attributes:
        max_len: most tokens of prompt and completion together.
        vocab_size: token ids are below it.
        died: the exception that every call raises after the engine has ended.
    """

    max_len: int
    vocab_size: int
    died: type[Exception]

    @property
    def has_died(self) -> bool:
        """Whether the engine has ended."""
        ...

    async def sample(self, request: api.GenerateRequest, index: int, seed: int) -> api.Choice:
        """Sample one choice. Cancelling this drops it. Raise RequestError (400) if the engine refuses the request."""
        ...

    async def probe(self, *, generates: bool) -> str | None:
        """Ask the engine whether it lives, for a token if `generates`; return its failure, or None."""
        ...


def build_application(vllm_app: Starlette, routes: Routes, *, local: bool, admin_token: str | None) -> ASGIApp:
    """Return the whole application: the project's routes before vLLM's, and the gate before both; see `Gate`."""
    lifespan = vllm_app.router.lifespan_context
    app = Starlette(routes=[*routes.all(), Mount("", vllm_app)], lifespan=lambda _: lifespan(vllm_app))  # type: ignore[arg-type]
    gated = Gate(app, local=local, admin_token=admin_token, most_body_bytes=api.largest_request(routes.sampler.max_len))
    return PolicyVersionMiddleware(gated, routes)


@dataclass(eq=False)
class Routes:
    """Handlers of the project's routes. An engine that needs longer for a probe than `health_timeout_s` is failing."""

    sampler: SamplingEngine
    _: KW_ONLY
    engine_weights: EngineWeights
    ownership: Ownership
    metrics: ServerMetrics
    model_name: str
    health_timeout_s: float
    _probe: asyncio.Task[str | None] | None = None
    _probe_samples: bool = False

    def all(self) -> list[BaseRoute]:
        """Return the routes, each with its errors turned into answers."""
        handlers = {
            api.GENERATE_ROUTE: (self.generate, "POST"),
            api.HEALTH_ROUTE: (self.health, "GET"),
            api.WEIGHTS_ROUTE: (self.weights, "GET"),
            api.UPDATE_ROUTE: (self.update_weights, "POST"),
            api.CLAIM_ROUTE: (self.claim, "POST"),
            api.RELEASE_ROUTE: (self.release, "POST"),
        }
        return [
            Route(path, _answering(handler, self.sampler.died), methods=[method])
            for path, (handler, method) in handlers.items()
        ]

    async def generate(self, request: Request) -> Response:
        """Sample one choice per seed; the engine drops them when the client goes away."""
        wanted = decode_body(await request.body(), api.GenerateRequest)
        if self.engine_weights.version is None:
            raise RequestError(503, self.engine_weights.none_because)
        with self.metrics.request():
            gone = RequestError(499, "the client closed the connection")  # nginx's code; nobody reads it
            answer = await unless(self._sample(wanted), _disconnected(request), gone)
        return _json(answer, headers={api.VERSION_HEADER: str(answer.version)})

    def _check(self, request: api.GenerateRequest) -> None:
        """Refuse what the engine would cut short or die of."""
        total = len(request.token_ids) + request.max_tokens
        if total > self.sampler.max_len:
            raise RequestError(
                400,
                f"{len(request.token_ids)} prompt tokens + max_tokens {request.max_tokens} = {total} exceed "
                f"the model's length of {self.sampler.max_len} (model.max_len)",
            )
        for name, ids in (("token_ids", request.token_ids), ("stop_token_ids", request.stop_token_ids)):
            if ids and (largest := max(ids)) >= self.sampler.vocab_size:
                raise RequestError(400, f"{name} holds {largest}, the vocabulary has {self.sampler.vocab_size} tokens")
        if request.temperature != 0 and not _MIN_TEMPERATURE <= request.temperature <= _MAX_TEMPERATURE:
            raise RequestError(
                400, f"temperature is {request.temperature}; allowed are 0 and {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}"
            )

    async def _sample(self, request: api.GenerateRequest) -> api.GenerateResponse:
        """Sample one choice per seed. Cancelling this aborts all in the engine."""
        self._check(request)
        digest = request.weights_digest
        if digest is not None:
            self.engine_weights.require(digest)
        num_updates = self.engine_weights.num_updates  # before sampling: a later update shows
        choices = await asyncio.gather(
            *(self.sampler.sample(request, index, seed) for index, seed in enumerate(request.seeds))
        )
        versions = [span.version for choice in choices for span in choice.versions]
        if not versions:
            raise RequestError(503, "the request was aborted before a token was sampled: the server is stopping")
        if digest is not None and request.prompt_logprobs and self.engine_weights.num_updates != num_updates:
            # Spans cover sampled tokens only; the prompt may have been computed by both versions.
            raise RequestError(
                409,
                "the weights were replaced while the prompt's log-probabilities were computed",
                code=api.OTHER_WEIGHTS,
            )
        return api.GenerateResponse(choices=choices, version=max(versions), boot_id=self.engine_weights.boot_id)

    async def weights(self, request: Request) -> Response:
        """Return version and digest of the served weights."""
        return _json(self._served())

    async def update_weights(self, request: Request) -> Response:
        """Replace the weights."""
        wanted = decode_body(await request.body(), api.UpdateRequest)
        updated = await self.engine_weights.update(
            Path(wanted.path), version=wanted.version, owner=wanted.owner, transfer=wanted.transfer
        )
        return _json(updated)

    async def claim(self, request: Request) -> Response:
        """Make a run the owner of the server."""
        self.ownership.claim(decode_body(await request.body(), api.Owner))
        return _json(self._served())

    async def release(self, request: Request) -> Response:
        """End the ownership of the run that asks; the weights continue to serve."""
        self.ownership.release(decode_body(await request.body(), api.Owner))
        return _json(self._served())

    async def health(self, request: Request) -> Response:
        """Prove that the engine works: it gave output in the last seconds, or answers a probe in time."""
        reason = await self._failure_reason()
        body = api.HealthStatus(
            status="ok" if reason is None else "failing", weights=self.engine_weights.version, reason=reason
        )
        return _json(body, status=200 if reason is None else 503)

    async def _failure_reason(self) -> str | None:
        if self.sampler.has_died:
            return "the engine died"
        if time.monotonic() - self.metrics.last_progress < _RECENT_S:
            return None
        # Callers that come while a probe runs share it, so that a hung engine gathers no requests.
        # Not the probe from before the weights were torn: it samples, and the paused engine keeps it.
        samples = self.engine_weights.version is not None
        if self._probe is None or self._probe.done() or samples != self._probe_samples:
            self._probe = asyncio.create_task(self.sampler.probe(generates=samples))
            self._probe_samples = samples
        try:
            # Shielded: a caller that gives up must not cancel the probe that other callers wait for.
            return await asyncio.wait_for(asyncio.shield(self._probe), self.health_timeout_s)
        except TimeoutError:
            return f"the engine gave no answer to a probe within {self.health_timeout_s:g} s"
        except self.sampler.died:
            return "the engine died"

    def _served(self) -> api.ServedWeights:
        return api.ServedWeights(
            version=self.engine_weights.version,
            digest=self.engine_weights.digest,
            model=self.model_name,
            uid=os.getuid(),
            boot_id=self.engine_weights.boot_id,
            owner=self.ownership.status(),
            num_workers=self.engine_weights.num_workers,
        )


class PolicyVersionMiddleware:
    """Stamps every answer with the policy version, counts requests to vLLM's generation routes, renews the lease.

    `3` served from the request's arrival to its answer; `3-4`: the weights changed meanwhile."""

    def __init__(self, app: ASGIApp, routes: Routes) -> None:
        self._app = app
        self._engine_weights = routes.engine_weights
        self._metrics = routes.metrics
        self._ownership = routes.ownership

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        before = self._engine_weights.version
        for name, value in scope["headers"]:
            if name == _OWNER_HEADER:
                self._ownership.renew(value.decode("latin-1"))

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if not any(name == api.VERSION_HEADER.encode() for name, _ in headers):
                    served = _version_text(before, self._engine_weights.version)
                    headers.append((api.VERSION_HEADER.encode(), served.encode()))
            await send(message)

        if asks_the_model(scope["method"], scope["path"]):  # our own route looks for itself
            if before is None:
                body = openai_error(503, self._engine_weights.none_because)
                await _json(body, status=503)(scope, receive, stamped)
                return
            with self._metrics.request():
                await self._app(scope, receive, stamped)
        else:
            await self._app(scope, receive, stamped)


def _version_text(before: int | None, after: int | None) -> str:
    if after is None:
        return "none"
    return str(after) if before in (None, after) else f"{before}-{after}"


def _answering(handler: _Handler, died: type[Exception]) -> _Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return _error(error.status, error.reason, code=error.code)
        except HTTPException as error:
            return _error(error.status_code, error.detail)
        except died:
            return _error(503, "the engine died; the server is going down")

    return answer


async def unless(work: Coroutine[Any, Any, _T], event: Coroutine[Any, Any, object], error: Exception) -> _T:
    """Return the result of `work`; cancel it and raise `error` if `event` comes first."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        # Also if we are cancelled ourselves: the engine drops what nobody waits for.
        working.cancel()
        waiting.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body, enc_hook=list_packed), status, headers, media_type="application/json")


def _error(status: int, reason: str, *, code: str = "") -> Response:
    return _json(api.ErrorBody(reason, code), status=status)
