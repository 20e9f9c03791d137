"""All inference servers of one model: readiness, weight updates, generation.

Generation is idempotent, because every request carries its seeds. So when a connection breaks, or a server is busy or
fails, the client waits until the server is back, makes sure that it serves the right weights, and asks again, with
growing pauses: a killed and restarted server costs time, not the run.

Every request also names the weights that it is for, and every answer those that sampled it. A server that serves
others (it was restarted, or somebody else pushed to it) counts as lost as well, whenever that came to pass.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import msgspec

from holdfast.orchestrator.engines.answers import check_choices
from holdfast.orchestrator.engines.engine import Engine
from holdfast.orchestrator.engines.http import Transport, Unavailable, decode
from holdfast.orchestrator.task_group import run_all
from holdfast.orchestrator.weight_push.published_files import PublishedWeights
from holdfast.shared.config.orchestrator import ServersConfig
from holdfast.shared.errors import InferenceError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.files.run_owner import owner_of
from holdfast.shared.wire.canary import Canary, deviation
from holdfast.shared.wire.inference_api import (
    GENERATE_ROUTE,
    Choice,
    GenerateRequest,
    GenerateResponse,
    Owner,
    ServedWeights,
    largest_answer,
)

_log = logging.getLogger("orchestrator")

# How often a server hears from the run that owns it, beside its requests: well within any `server.lease_s`.
_SIGN_OF_LIFE_S = 5.0


class InferenceClient:
    """One client for all engines that serve one model.

    Use as an async context manager.

    Attributes:
        vocab_size: how many token ids the policy has, where that is known.

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
        self._run_dir = run_dir
        self._owner: Owner | None = None
        self._living: asyncio.Task[None] | None = None
        self._is_released = asyncio.Event()
        self._key = key
        self.vocab_size = vocab_size
        self._transport = Transport(config, key=key)
        self._engines = [
            Engine(url.rstrip("/"), self._transport, key=key, ready_timeout_s=config.ready_timeout_s)
            for url in config.urls
        ]
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
        await run_all(engine.check(model=model, seq_len=seq_len) for engine in self._engines)
        if self._run_dir is not None and self._run_dir.holds_run():  # else the trainer is still to be started, by hand
            await self._claim(self._run_dir)

    async def serve(self, weights: PublishedWeights) -> None:
        """Make every engine serve `weights`, and read version and digest back. From then on the run owns the servers.

        Raises:
            InferenceError: an engine refused, belongs to another run, or serves something else afterwards.
        """
        if self._owner is None:
            assert self._run_dir is not None, "weights are pushed by a run"
            await self._claim(self._run_dir)
        self._weights = weights
        await run_all(self._give(engine, weights) for engine in self._engines)

    async def _give(self, engine: Engine, weights: PublishedWeights) -> None:
        owner = self._owner
        assert owner is not None, "serve comes first"
        await engine.insist(lambda: engine.push(weights, owner))

    async def _claim(self, run_dir: RunDir) -> None:
        """Own the servers, until `release` or a silence that is too long.

        Raises:
            InferenceError: one belongs to another run.
        """
        owner = self._owner = owner_of(run_dir)
        self._transport.run_id = owner.run_id
        await run_all(engine.insist(lambda engine=engine: engine.claim(owner)) for engine in self._engines)
        self._living = asyncio.create_task(self._give_signs_of_life(owner))

    async def release(self) -> None:
        """Give the servers back, also those that an attempt before this one claimed; they serve on."""
        if self._run_dir is None or not self._run_dir.holds_run():
            return
        owner = self._owner or owner_of(self._run_dir)
        self._is_released.set()
        if self._living is not None:  # a claim that is under way would own the server again
            await self._living

        async def release(engine: Engine) -> None:
            try:
                await engine.release(owner)
            except (InferenceError, Unavailable) as error:
                _log.warning("%s was not given back, so other runs cannot use it yet: %s", engine.url, error)

        await run_all(release(engine) for engine in self._engines)

    async def _give_signs_of_life(self, owner: Owner) -> None:
        """Claim every server again every few seconds: one that was restarted has forgotten who its owner is."""

        async def tell(engine: Engine) -> None:
            try:
                await engine.claim(owner)
            except (InferenceError, Unavailable) as error:
                _log.debug("%s did not hear a sign of life: %s", engine.url, error)

        while not self._is_released.is_set():
            await asyncio.gather(*(tell(engine) for engine in self._engines))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_released.wait(), _SIGN_OF_LIFE_S)

    async def _fall_silent(self) -> None:
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)

    async def adopt(self) -> ServedWeights:
        """Take what all servers serve as what they must always serve, and return it: for a fixed model.

        Raises:
            InferenceError: a server has no weights, or two serve different ones.
        """
        found = await run_all(engine.insist(engine.served) for engine in self._engines)
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

    async def check_canary(self, canary: Canary, *, weights_digest: str) -> None:
        """Have every engine compute the canary's log-probabilities with the weights that it is of, and compare.

        Raises:
            InferenceError: an engine computes something else from the weights that it reports.
        """
        request = GenerateRequest(
            token_ids=canary.token_ids,
            seeds=[0],
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
        digest = request.weights_digest
        assert digest is not None, "a run names the weights that it asks"
        target = self._engines[engine]
        body = msgspec.json.encode(request)
        most_bytes = largest_answer(request)
        patience = target.patience()
        while True:
            # A server that just restarted must not be asked before it has its weights again.
            async with target.recovering:
                epoch = target.epoch
            try:
                with self._counted():
                    data = await self._transport.post(target.url, GENERATE_ROUTE, body, most_bytes=most_bytes)
                answer = decode(data, GenerateResponse, url=target.url)
                target.note_boot(answer.boot_id)
                choices = check_choices(answer, request, url=target.url, vocab_size=self.vocab_size)
                for choice in choices:
                    self._check_sampled_by(choice, digest)
                return choices
            except Unavailable as failure:
                await patience.pause(failure)
                await self._recover(target, epoch=epoch, failure=failure)

    def _check_sampled_by(self, choice: Choice, digest: str) -> None:
        """Take nothing for an answer that other weights had a part in, whatever they call themselves.

        Raises:
            Unavailable: they had; the server needs its weights again.
        """
        version = self._weights.version if self._weights is not None else None
        for span in choice.versions:
            if span.digest != digest or version not in (None, span.version):
                raise Unavailable(
                    f"tokens were sampled by policy version {span.version} with digest {span.digest:.80}, asked for "
                    f"was {'the digest' if version is None else f'version {version} with digest'} {digest}",
                    patience_s=0.0,
                )

    async def _recover(self, engine: Engine, *, epoch: int, failure: Unavailable) -> None:
        """Wait for a lost engine and give it the current weights again; one caller does it for all."""
        async with engine.recovering:
            if engine.epoch != epoch:
                return
            _log.warning("%s: %s; waiting for it", engine.url, failure)
            await engine.wait_for_health()
            if self._fixed is None:
                assert self._weights is not None, "serve comes first"
                await self._give(engine, self._weights)
            else:
                served = await engine.insist(engine.served)
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
