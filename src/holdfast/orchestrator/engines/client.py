"""All inference servers of one model: readiness, generation, and going on with one that was lost.

Generation is idempotent, because every request carries its seeds. So when a connection breaks, or a server is busy or
fails, the client waits until the server is back, makes sure that it serves the right weights, and asks again, with
growing pauses: a killed and restarted server costs time, not the run.

Every request also names the weights that it is for, and every answer those that sampled it. A server that serves
others (it was restarted, or somebody else pushed to it) counts as lost as well, whenever that came to pass.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from holdfast.orchestrator.engines.answers import check_choices
from holdfast.orchestrator.engines.engine import Engine
from holdfast.orchestrator.engines.http import HttpTransport, Unavailable, decode
from holdfast.orchestrator.engines.lease import Lease
from holdfast.orchestrator.task_group import run_all
from holdfast.shared.config.orchestrator import ServersConfig
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.clock import BusyClock
from holdfast.shared.wire.inference_api import (
    GENERATE_ROUTE,
    Choice,
    GenerateRequest,
    GenerateResponse,
    largest_answer,
)

_log = logging.getLogger("orchestrator")

# Sees to it that an engine which was lost, and is back, serves the right weights again.
Restore = Callable[[Engine], Awaitable[None]]


class InferenceClient:
    """One client for all engines that serve one model.

    Use as an async context manager.

    Attributes:
        engines: the servers.
        lease: by which the run owns them.
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
        self.vocab_size = vocab_size
        self._transport = HttpTransport(config, key=key)
        self.engines: Sequence[Engine] = [
            Engine(url.rstrip("/"), self._transport, key=key, ready_timeout_s=config.ready_timeout_s)
            for url in config.urls
        ]
        self.lease = Lease(self.engines, self._transport, run_dir)
        self._version: int | None = None
        self._restore: Restore | None = None
        self._busy = BusyClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Before the transport that its signs of life go by.
        await self.lease.close()
        await self._transport.close()

    @property
    def num_engines(self) -> int:
        """How many servers there are."""
        return len(self.engines)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which at least one generation request was in flight."""
        return self._busy.busy_s

    async def wait_until_ready(self, *, model: str, seq_len: int) -> None:
        """Wait for every server, and check that each serves `model` and sessions of `seq_len` tokens.

        Raises:
            InferenceError: a server does not answer within `ready_timeout_s`, or serves another model.
            ConfigError: the server's longest session is shorter than `seq_len`.
        """
        await run_all(engine.check(model=model, seq_len=seq_len) for engine in self.engines)
        await self.lease.claim_if_begun()

    def expect(self, *, version: int | None, restore: Restore) -> None:
        """Take from now on answers of policy `version` alone, and have `restore` mend an engine that was lost.

        Args:
            version: None: of whichever; the digest that a request names decides.
            restore: sees to it that an engine which is back serves the right weights.
        """
        self._version, self._restore = version, restore

    async def generate(self, request: GenerateRequest, *, engine: int) -> list[Choice]:
        """Return one choice per seed, in the order of the seeds, all sampled by the weights that `request` is for.

        Raises:
            InferenceError: the server refused or failed, gave no answer within `timeout_s`, or serves other weights
                again and again.
        """
        digest = request.weights_digest
        assert digest is not None, "a run names the weights that it asks"
        target = self.engines[engine]
        body = msgspec.json.encode(request)
        most_bytes = largest_answer(request)
        attempts = target.retry_policy()
        while True:
            # A server that just restarted must not be asked before it has its weights again.
            async with target.recovering:
                # Of before the request: whoever recovers the engine meanwhile has done so for us as well.
                epoch = target.epoch
            try:
                with self._busy.count():
                    data = await self._transport.post(target.url, GENERATE_ROUTE, body, most_bytes=most_bytes)
                answer = decode(data, GenerateResponse, url=target.url)
                # Before the check: a restart explains what it finds.
                target.note_boot(answer.boot_id)
                choices = check_choices(answer, request, url=target.url, vocab_size=self.vocab_size)
                for choice in choices:
                    self._check_sampled_by(choice, digest)
                return choices
            except Unavailable as failure:
                await attempts.pause(failure)
                await self._recover(target, epoch=epoch, failure=failure)

    def _check_sampled_by(self, choice: Choice, digest: str) -> None:
        """Take nothing for an answer that other weights had a part in, whatever they call themselves.

        Raises:
            Unavailable: they had; the server needs its weights again.
        """
        version = self._version
        for span in choice.versions:
            if span.digest != digest or version not in (None, span.version):
                raise Unavailable(
                    f"tokens were sampled by policy version {span.version} with digest {span.digest:.80}, asked for "
                    f"was {'the digest' if version is None else f'version {version} with digest'} {digest}",
                    retry_for_s=0.0,  # weights that are pushed again and still differ do not come right with time
                )

    async def _recover(self, engine: Engine, *, epoch: int, failure: Unavailable) -> None:
        """Wait for a lost engine and have its weights restored; one caller does it for all."""
        async with engine.recovering:
            # Another request has recovered it while this one waited for the lock.
            if engine.epoch != epoch:
                return
            _log.warning("%s: %s; waiting for it", engine.url, failure)
            await engine.wait_for_health()
            assert self._restore is not None, "expect comes first"
            await self._restore(engine)
            # Last: a restore that fails leaves the engine lost for the next caller.
            engine.epoch += 1
