"""Talks to the inference servers: readiness, weight updates, generation.

Generation is idempotent, because every request carries its seeds. So when a connection breaks, the
client waits until the server is back, makes sure that it serves the right weights, and asks again:
a killed and restarted server costs time, not the run.

Every request also names the weights that it is for, and every answer those that sampled it. A server that serves
others (it was restarted, or somebody else pushed to it) counts as lost as well, whenever that came to pass.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from orchestrator.answers import check_choice
from orchestrator.concurrency import run_all
from orchestrator.protocol import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    ModelList,
    PushedWeights,
    ServedWeights,
)
from orchestrator.transport import Transport, Unavailable, decode
from orchestrator.weights import PublishedWeights
from triad.canary import Canary, deviation
from triad.config.orchestrator import ServersConfig
from triad.errors import ConfigError, InferenceError
from triad.owner import Owner, owner_of
from triad.run_dir import RunDir

_log = logging.getLogger("orchestrator")

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
# How often a server hears from the run that owns it, beside its requests: well within any `server.lease_s`.
_SIGN_OF_LIFE_S = 5.0
# How often one request may lose its server before the run gives up on it.
_ATTEMPTS = 5

_T = TypeVar("_T")


@dataclass
class _Engine:
    """One server.

    Attributes:
        boot_id: of its process, as it said last.
        epoch: how often it was lost and found again.
        recovering: held meanwhile.
    """

    url: str
    boot_id: str = ""
    epoch: int = 0
    recovering: asyncio.Lock = field(default_factory=asyncio.Lock)


class InferenceClient:
    """One client for all engines that serve one model.

    Use as an async context manager.

    Args:
        config: where the servers are.
        run_dir: of the run that owns them from the first push on; None: nothing will be pushed.
        key: of `config` in the orchestrator's configuration, for errors.
        vocab_size: how many token ids the policy has; None: sampled ids are checked for their sign alone.
    """

    def __init__(
        self,
        config: ServersConfig,
        *,
        run_dir: RunDir | None = None,
        key: str = "client",
        vocab_size: int | None = None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._owner: Owner | None = None
        self._living: asyncio.Task[None] | None = None
        self._key = key
        self._vocab_size = vocab_size
        self._engines = [_Engine(url.rstrip("/")) for url in config.urls]
        self._transport = Transport(config, key=key)
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
        await self._fall_silent()
        await self._transport.close()

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
        if self._run_dir is not None and self._run_dir.holds_run():  # else the trainer is still to be started, by hand
            await self._claim(self._run_dir)

    async def _check_engine(self, engine: _Engine, *, model: str, seq_len: int) -> None:
        await self._wait_for_health(engine)
        served = await self._insist(engine, self._served)
        if not _same_model(served.model, model):
            raise InferenceError(
                f"{engine.url} serves the model '{served.model}', this run needs '{model}'. Start the server with "
                f"--model.name {model}, or name the right server in {self._key}.urls."
            )
        try:
            cards = msgspec.json.decode(await self._transport.get(engine.url, "/v1/models"), type=ModelList).data
        except (InferenceError, Unavailable, msgspec.DecodeError):
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
                await self._transport.get(engine.url, "/health")
                return
            except Unavailable as failure:
                if time.monotonic() + backoff_s > deadline:
                    raise InferenceError(
                        f"the inference server {engine.url} did not become ready within "
                        f"{self._config.ready_timeout_s:g} s ({self._key}.ready_timeout_s): {failure}. "
                        "Is it running at this address?"
                    ) from None
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def serve(self, weights: PublishedWeights) -> None:
        """Make every engine serve `weights`, and read version and digest back. From then on the run owns the servers.

        Raises:
            InferenceError: an engine refused, belongs to another run, or serves something else afterwards.
        """
        if self._owner is None:
            assert self._run_dir is not None, "weights are pushed by a run"
            await self._claim(self._run_dir)
        self._weights = weights
        await run_all(self._insist(engine, lambda engine: self._push(engine, weights)) for engine in self._engines)

    async def _claim(self, run_dir: RunDir) -> None:
        """Own the servers, until `release` or a silence that is too long.

        Raises:
            InferenceError: one belongs to another run.
        """
        self._owner = owner_of(run_dir)
        self._transport.run_id = self._owner.run_id
        await run_all(self._insist(engine, self._take) for engine in self._engines)
        self._living = asyncio.create_task(self._give_signs_of_life())

    async def _take(self, engine: _Engine) -> None:
        body = msgspec.json.encode(self._owner)
        await self._transport.post_as_admin(engine.url, "/claim", body, is_probe=True)

    async def release(self) -> None:
        """Give the servers back, also those that an attempt before this one claimed; they serve on."""
        if self._run_dir is None or not self._run_dir.holds_run():
            return
        await self._fall_silent()
        body = msgspec.json.encode(self._owner or owner_of(self._run_dir))
        for engine in self._engines:
            try:
                await self._transport.post_as_admin(engine.url, "/release", body, is_probe=True)
            except (InferenceError, Unavailable) as error:
                _log.warning("%s was not given back, so other runs cannot use it yet: %s", engine.url, error)

    async def _give_signs_of_life(self) -> None:
        """Claim every server again every few seconds: one that was restarted has forgotten who its owner is."""

        async def tell(engine: _Engine) -> None:
            try:
                await self._take(engine)
            except (InferenceError, Unavailable) as error:
                _log.debug("%s did not hear a sign of life: %s", engine.url, error)

        while True:
            await asyncio.gather(*(tell(engine) for engine in self._engines))
            await asyncio.sleep(_SIGN_OF_LIFE_S)

    async def _fall_silent(self) -> None:
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)

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
            except Unavailable as failure:
                if attempt == _ATTEMPTS:
                    raise InferenceError(f"{engine.url} was lost {attempt} times in a row: {failure}") from None
                _log.warning("%s: %s; waiting for it", engine.url, failure)
                await self._wait_for_health(engine)
            attempt += 1

    async def _push(self, engine: _Engine, weights: PublishedWeights) -> None:
        served = await self._served(engine)
        if (served.version, served.digest) != (weights.version, weights.digest):
            assert self._owner is not None, "serve comes first"
            body = msgspec.json.encode(PushedWeights(str(weights.path), weights.version, self._owner))
            await self._transport.post_as_admin(engine.url, "/update_weights", body)
            served = await self._served(engine)
        if served.version != weights.version:
            raise InferenceError(
                f"{engine.url} was given policy version {weights.version} and reports version {served.version}. "
                "Does somebody else push weights to this server?"
            )
        if served.digest != weights.digest:
            raise InferenceError(
                f"{engine.url} loaded version {weights.version} with digest {served.digest}, but {weights.path} "
                f"was published with digest {weights.digest}: the weights changed or were damaged on the way."
            )

    async def check_canary(self, canary: Canary, *, weights_digest: str) -> None:
        """Have every engine compute the canary's log-probabilities with the weights that it is of, and compare.

        Raises:
            InferenceError: an engine computes something else from the weights that it reports.
        """
        request = GenerateRequest(
            token_ids=canary.token_ids,
            seeds=[0],
            temperature=1.0,
            max_tokens=1,
            stop_token_ids=[],
            weights_digest=weights_digest,
            prompt_logprobs=True,
        )
        for number, engine in enumerate(self._engines):
            (choice,) = await self.generate(request, engine=number)
            found, allowed = deviation(canary, choice.prompt_logprobs or []), canary.allowed_nats
            _log.info("%s: canary differs by %.2g nats from the trainer's (allowed: %s)", engine.url, found, allowed)
            if allowed is not None and not found <= allowed:
                raise InferenceError(
                    f"{engine.url} serves the right weights, but computes other log-probabilities from them than the "
                    f"trainer: {found:.3g} nats apart on average for a fixed text, allowed are {allowed:.3g}. One of "
                    "the two leaves out a detail of the architecture, such as an attention soft cap (try "
                    "--trainer.model.attention eager), or has another dtype (--trainer.sampler-dtype), config.json or "
                    "a faulty kernel. If the difference is meant, raise --trainer.mismatch-limit."
                )

    async def generate(self, request: GenerateRequest, *, engine: int) -> list[Choice]:
        """Return one choice per seed, in the order of the seeds, all sampled by the weights that `request` is for.

        Raises:
            InferenceError: the server refused or failed, gave no answer within `timeout_s`, or serves other weights
                again and again.
        """
        target = self._engines[engine]
        body = msgspec.json.encode(request)
        failure: Unavailable | None = None
        for _ in range(_ATTEMPTS):
            # A server that just restarted must not be asked before it has its weights again.
            async with target.recovering:
                epoch = target.epoch
            try:
                with self._counted():
                    data = await self._transport.post(target.url, "/inference/v1/generate", body)
                answer = decode(data, GenerateResponse, url=target.url)
                self._note_boot(target, answer.boot_id)
                choices = _checked_choices(answer, request, url=target.url, vocab_size=self._vocab_size)
                for choice in choices:
                    self._check_sampled_by(choice, request.weights_digest)
                return choices
            except Unavailable as error:
                failure = error
                await self._recover(target, epoch=epoch, failure=error)
        raise InferenceError(f"{target.url} was lost {_ATTEMPTS} times during one generation request: {failure}")

    def _check_sampled_by(self, choice: Choice, digest: str) -> None:
        """Take nothing for an answer that other weights had a part in, whatever they call themselves.

        Raises:
            Unavailable: they had; the server needs its weights again.
            InferenceError: the server does not say it of every token.
        """
        version = self._weights.version if self._weights is not None else None
        covered = 0
        for span in choice.versions:
            if span.digest != digest or version not in (None, span.version):
                raise Unavailable(
                    f"tokens were sampled by policy version {span.version} with digest {span.digest}, asked for was "
                    f"{'the digest' if version is None else f'version {version} with digest'} {digest}"
                )
            if span.start != covered:
                break
            covered = span.end
        if covered != len(choice.token_ids):
            raise InferenceError(
                f"an engine says for {covered} of {len(choice.token_ids)} sampled tokens which policy version "
                "made them; every token needs one"
            )

    def _note_boot(self, engine: _Engine, boot_id: str) -> None:
        """Say that a server was restarted. It need not have been asked anything meanwhile."""
        if engine.boot_id not in ("", boot_id):
            _log.warning("%s was restarted", engine.url)
        engine.boot_id = boot_id

    async def _recover(self, engine: _Engine, *, epoch: int, failure: Unavailable) -> None:
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
                        f"{engine.url} came back with other weights: digest {served.digest}, was {self._fixed.digest}. "
                        "Does a run push weights to it? A teacher must not be trained."
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
        served = decode(await self._transport.get(engine.url, "/weights"), ServedWeights, url=engine.url)
        self._note_boot(engine, served.boot_id)
        return served


def _checked_choices(
    response: GenerateResponse, request: GenerateRequest, *, url: str, vocab_size: int | None
) -> list[Choice]:
    """Check an answer: one whole choice per seed, of numbers that can be."""
    choices = sorted(response.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(len(request.seeds))):
        raise InferenceError(
            f"{url} answered {len(request.seeds)} seeds with the choices {[choice.index for choice in choices]}"
        )
    for choice in choices:
        if choice.finish_reason == "abort":
            raise Unavailable("the server aborted a generation request")
        if not 1 <= len(choice.token_ids) <= request.max_tokens or len(choice.logprobs) != len(choice.token_ids):
            raise InferenceError(
                f"{url} gave {len(choice.token_ids)} token ids with {len(choice.logprobs)} logprobs; expected "
                f"equally many, from 1 to max_tokens = {request.max_tokens}"
            )
        check_choice(choice, request, url=url, vocab_size=vocab_size)
    newest = {span.version for choice in choices for span in choice.versions}
    if newest and response.version != max(newest):
        raise InferenceError(
            f"{url} says that version {response.version} answered, and its choices are of version {max(newest)}"
        )
    return choices


def _same_model(served: str, wanted: str) -> bool:
    if served == wanted:
        return True
    return Path(served).exists() and Path(wanted).exists() and Path(served).resolve() == Path(wanted).resolve()
