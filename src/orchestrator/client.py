"""Talks to the inference servers: readiness, weight updates, generation.

Generation is idempotent, because every request carries its seeds. So when a connection breaks, the
client waits until the server is back, makes sure that it serves the right weights, and asks again:
a killed and restarted server costs time, not the run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec

from orchestrator.concurrency import run_all
from orchestrator.protocol import Choice, GenerateRequest, GenerateResponse, ModelList, ServedWeights
from orchestrator.weights import PublishedWeights
from triad.arrays import decode_packed
from triad.canary import Canary, deviation
from triad.config.orchestrator import ClientConfig, ServersConfig
from triad.errors import ConfigError, InferenceError

_log = logging.getLogger("orchestrator")

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
# A probe of a busy engine may take long; vLLM's own deadline for one is 20 s.
_PROBE_TIMEOUT_S = 30.0
# uvicorn drops connections after 5 s of silence; leaving first avoids writing into a closed one.
_KEEPALIVE_S = 4.0
# httpx polls every connection of a pool at every request, so many small pools cost less than one large.
_POOL_CONNECTIONS = 16
# How often one request may lose its server before the run gives up on it.
_ATTEMPTS = 5
_UNAVAILABLE = (502, 503, 504)

_T = TypeVar("_T")


class _Unavailable(Exception):
    """The server is not there, or not ready; asking again may help."""


@dataclass
class _Engine:
    """One server. `epoch` counts how often it was lost and found again, `recovering` is held meanwhile."""

    url: str
    epoch: int = 0
    recovering: asyncio.Lock = field(default_factory=asyncio.Lock)


class InferenceClient:
    """One client for all engines that serve one model.

    Use as an async context manager.

    Args:
        config: where the servers are.
        key: of `config` in the orchestrator's configuration, for errors.
    """

    def __init__(self, config: ServersConfig, *, key: str = "client") -> None:
        self._config = config
        self._key = key
        self._engines = [_Engine(url.rstrip("/")) for url in config.urls]
        token = os.environ.get(config.admin_token_env) if isinstance(config, ClientConfig) else None
        self._admin = {"Authorization": f"Bearer {token}"} if token else {}
        # Making a TLS context reads every root certificate: tens of milliseconds, for nothing on plain http.
        verify = httpx.create_ssl_context() if any(url.startswith("https:") for url in config.urls) else False
        self._pools = [_new_pool(verify) for _ in range(max(1, config.max_concurrency // _POOL_CONNECTIONS))]
        self._next_pool = itertools.cycle(self._pools)
        self._weights: PublishedWeights | None = None
        self._fixed: ServedWeights | None = None
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            await pool.aclose()

    @property
    def num_engines(self) -> int:
        """How many servers there are."""
        return len(self._engines)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which at least one generation request was in flight."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._in_flight else 0.0)

    async def wait_until_ready(self, *, model: str, seq_len: int) -> None:
        """Wait for every server, and check that each serves `model` and sessions of `seq_len` tokens.

        Raises:
            InferenceError: a server does not answer within `ready_timeout_s`, or serves another model.
            ConfigError: the server's longest session is shorter than `seq_len`.
        """
        await run_all(self._check_engine(engine, model=model, seq_len=seq_len) for engine in self._engines)

    async def _check_engine(self, engine: _Engine, *, model: str, seq_len: int) -> None:
        await self._wait_for_health(engine)
        served = await self._served(engine)
        if not _same_model(served.model, model):
            raise InferenceError(
                f"{engine.url} serves the model '{served.model}', this run needs '{model}'. Start the server with "
                f"--model.name {model}, or name the right server in {self._key}.urls."
            )
        try:
            cards = msgspec.json.decode(await self._get(engine, "/v1/models"), type=ModelList).data
        except (InferenceError, _Unavailable, msgspec.DecodeError):
            return  # optional: the server itself refuses what is too long
        longest = cards[0].max_model_len if cards else None
        if longest is not None and longest < seq_len:
            raise ConfigError(
                f"sessions of {seq_len} tokens are more than {engine.url} serves (model.max_len = {longest}). "
                "Lower seq_len or raise model.max_len."
            )

    async def _wait_for_health(self, engine: _Engine) -> None:
        deadline = time.monotonic() + self._config.ready_timeout_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._get(engine, "/health")
                return
            except _Unavailable as failure:
                if time.monotonic() + backoff_s > deadline:
                    raise InferenceError(
                        f"the inference server {engine.url} did not become ready within "
                        f"{self._config.ready_timeout_s:g} s ({self._key}.ready_timeout_s): {failure}. "
                        "Is it running at this address?"
                    ) from None
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def serve(self, weights: PublishedWeights) -> None:
        """Make every engine serve `weights`, and read version and digest back.

        Raises:
            InferenceError: an engine refused, or serves something else afterwards.
        """
        self._weights = weights
        await run_all(self._insist(engine, lambda engine: self._push(engine, weights)) for engine in self._engines)

    async def adopt(self) -> ServedWeights:
        """Take what all servers serve as what they must always serve, and return it: for a fixed model.

        Raises:
            InferenceError: a server has no weights, or two serve different ones.
        """
        found = await run_all(self._insist(engine, self._served) for engine in self._engines)
        for engine, served in zip(self._engines, found, strict=True):
            if served.version is None or served.digest is None:
                raise InferenceError(f"{engine.url} has no weights. Start it with --model.load auto.")
            if served.digest != found[0].digest:
                raise InferenceError(
                    f"{engine.url} serves weights with digest {served.digest}, {self._engines[0].url} with digest "
                    f"{found[0].digest}: all servers of {self._key}.urls must serve the same"
                )
        self._fixed = found[0]
        return found[0]

    async def _insist(self, engine: _Engine, work: Callable[[_Engine], Awaitable[_T]]) -> _T:
        """Return what `work` returns, again and again while the engine is lost meanwhile."""
        attempt = 1
        while True:
            try:
                return await work(engine)
            except _Unavailable as failure:
                if attempt == _ATTEMPTS:
                    raise InferenceError(f"{engine.url} was lost {attempt} times in a row: {failure}") from None
                _log.warning("%s: %s; waiting for it", engine.url, failure)
                await self._wait_for_health(engine)
            attempt += 1

    async def _push(self, engine: _Engine, weights: PublishedWeights) -> None:
        served = await self._served(engine)
        if (served.version, served.digest) != (weights.version, weights.digest):
            body = msgspec.json.encode({"path": str(weights.path), "version": weights.version})
            await self._post(engine, "/update_weights", body, headers=self._admin)
            served = await self._served(engine)
        if served.version != weights.version:
            raise InferenceError(
                f"{engine.url} was given policy version {weights.version} and reports version {served.version}. "
                "Does another run use this server? Every run needs servers of its own."
            )
        if served.digest != weights.digest:
            raise InferenceError(
                f"{engine.url} loaded version {weights.version} with digest {served.digest}, but {weights.path} "
                f"was published with digest {weights.digest}: the weights changed or were damaged on the way."
            )

    async def check_canary(self, canary: Canary) -> None:
        """Have every engine compute the canary's log-probabilities, and compare.

        Raises:
            InferenceError: an engine computes something else from the weights that it reports.
        """
        request = GenerateRequest(
            token_ids=canary.token_ids,
            seeds=[0],
            temperature=1.0,
            max_tokens=1,
            stop_token_ids=[],
            prompt_logprobs=True,
        )
        for number, engine in enumerate(self._engines):
            (choice,) = await self.generate(request, engine=number)
            found, allowed = deviation(canary, choice.prompt_logprobs or [])
            _log.info("%s: canary differs by %.2g nats from the trainer's (allowed: %.2g)", engine.url, found, allowed)
            if not found <= allowed:
                raise InferenceError(
                    f"{engine.url} serves the right weights, but computes other log-probabilities from them than the "
                    f"trainer: {found:.3g} nats apart on average for a fixed text, allowed are {allowed:.3g}. Do both "
                    "run the same model (config.json), a sound build of vLLM and a fitting dtype?"
                )

    async def generate(self, request: GenerateRequest, *, engine: int) -> list[Choice]:
        """Return one choice per seed, in the order of the seeds.

        Raises:
            InferenceError: the server refused or failed, or gave no answer within `timeout_s`.
        """
        target = self._engines[engine]
        body = msgspec.json.encode(request)
        failure: _Unavailable | None = None
        for _ in range(_ATTEMPTS):
            # A server that just restarted must not be asked before it has its weights again.
            async with target.recovering:
                epoch = target.epoch
            try:
                with self._counted():
                    data = await self._post(target, "/inference/v1/generate", body, timeout_s=self._config.timeout_s)
                return _checked_choices(_decode(data, GenerateResponse, target), request, url=target.url)
            except _Unavailable as error:
                failure = error
                await self._recover(target, epoch=epoch, failure=error)
        raise InferenceError(f"{target.url} was lost {_ATTEMPTS} times during one generation request: {failure}")

    async def _recover(self, engine: _Engine, *, epoch: int, failure: _Unavailable) -> None:
        """Wait for a lost engine and give it the current weights again; one caller does it for all."""
        async with engine.recovering:
            if engine.epoch != epoch:
                return
            _log.warning("%s: %s; waiting for it", engine.url, failure)
            await self._wait_for_health(engine)
            if (weights := self._weights) is not None:
                await self._insist(engine, lambda engine: self._push(engine, weights))
            elif self._fixed is not None:
                served = await self._insist(engine, self._served)
                if served.digest != self._fixed.digest:
                    raise InferenceError(
                        f"{engine.url} came back with other weights: digest {served.digest}, was {self._fixed.digest}"
                    )
            engine.epoch += 1

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._in_flight == 0:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_s += time.perf_counter() - self._busy_since

    async def _served(self, engine: _Engine) -> ServedWeights:
        return _decode(await self._get(engine, "/weights"), ServedWeights, engine)

    async def _get(self, engine: _Engine, route: str) -> bytes:
        return await self._request(engine, "GET", route, timeout_s=_PROBE_TIMEOUT_S)

    async def _post(
        self,
        engine: _Engine,
        route: str,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        return await self._request(
            engine, "POST", route, body=body, headers=headers, timeout_s=timeout_s or self._config.timeout_s
        )

    async def _request(
        self,
        engine: _Engine,
        method: str,
        route: str,
        *,
        timeout_s: float,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """Return the body of a good answer.

        Raises:
            _Unavailable: there was no connection, it broke, or the server says that it is not ready.
            InferenceError: the server refused, failed, or took longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await next(self._next_pool).request(method, engine.url + route, content=body, headers=headers)
        except TimeoutError:
            reason = f"the inference server gave no answer to {method} {engine.url}{route} within {timeout_s:g} s"
            if method == "GET":
                raise _Unavailable(reason) from None
            raise InferenceError(f"{reason} ({self._key}.timeout_s)") from None
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self._key}.urls: '{engine.url}' is not a URL: {error}") from None
        except httpx.UnsupportedProtocol:
            raise ConfigError(f"{self._key}.urls: '{engine.url}' must begin with http:// or https://") from None
        except httpx.TransportError as error:
            raise _Unavailable(f"{method} {route}: {type(error).__name__} {error}".rstrip()) from None
        if answer.is_success:
            return answer.content
        reason = f"{method} {engine.url}{route} was answered {answer.status_code}: {_reason(answer)}"
        if answer.status_code in _UNAVAILABLE:
            raise _Unavailable(reason)
        if answer.status_code in (401, 403) and isinstance(self._config, ClientConfig):
            reason += f". Set {self._config.admin_token_env} to the server's admin token."
        raise InferenceError(reason)


def _new_pool(verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
        headers={"Content-Type": "application/json"},
        verify=verify,
        # Proxies of the environment are for the internet, not for the engines of a run.
        trust_env=False,
    )


def _decode(data: bytes, kind: type[_T], engine: _Engine) -> _T:
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=decode_packed)
    except msgspec.DecodeError as error:
        raise InferenceError(
            f"{engine.url} gave an answer that is no {kind.__name__}: {error}. Is it triad's inference server?"
        ) from None


def _reason(answer: httpx.Response) -> str:
    """The reason in an error answer, whichever of the usual fields holds it."""
    try:
        body = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return answer.text[:500] or "no reason given"
    if isinstance(body, dict):
        return str(body.get("error") or body.get("detail") or body)
    return str(body)


def _checked_choices(response: GenerateResponse, request: GenerateRequest, *, url: str) -> list[Choice]:
    """Check the shape of an answer: one whole choice per seed."""
    choices = sorted(response.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(len(request.seeds))):
        raise InferenceError(
            f"{url} answered {len(request.seeds)} seeds with the choices {[choice.index for choice in choices]}"
        )
    for choice in choices:
        if choice.finish_reason == "abort":
            raise _Unavailable("the server aborted a generation request")
        if not 1 <= len(choice.token_ids) <= request.max_tokens or len(choice.logprobs) != len(choice.token_ids):
            raise InferenceError(
                f"{url} gave {len(choice.token_ids)} token ids with {len(choice.logprobs)} logprobs; expected "
                f"equally many, from 1 to max_tokens = {request.max_tokens}"
            )
    return choices


def _same_model(served: str, wanted: str) -> bool:
    if served == wanted:
        return True
    return Path(served).exists() and Path(wanted).exists() and Path(served).resolve() == Path(wanted).resolve()
