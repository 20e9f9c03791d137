"""Client of all inference servers of one model: waits for them, generates, and continues if a server is lost.

Generation is idempotent, because every request carries its seeds. If a connection breaks, or a server is busy or fails,
the client asks another server at once. If all servers have failed, it asks again after growing pauses. A killed and
restarted server costs time, not the run.

Every request and every answer names its weights. A server with other weights counts as lost.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from holdfast.config.orchestrator import ServersConfig
from holdfast.orchestrator.client.http import HttpTransport, Unavailable, check_choices, decode
from holdfast.orchestrator.client.pool import Engine, EngineCounts, EnginePool, Lease, RetryPolicy, Work
from holdfast.process.heartbeat import BusyClock
from holdfast.protocol.inference import GENERATE_ROUTE, Choice, GenerateRequest, GenerateResponse, largest_answer
from holdfast.run.run_dir import RunDir

# How much more an engine must have in flight than the idlest one before that one computes a prefix again. Both must
# hold, as in the router of SGLang: without the first, few sessions would wander; without the second, many would.
_MORE_SEQUENCES = 16
_MORE_TIMES = 1.5


class Affinity:
    """Sessions that begin with the same tokens, and the engine that has them in its cache."""

    def __init__(self) -> None:
        self.engine: Engine | None = None


def choose(engines: Sequence[Engine], affinity: Affinity) -> Engine:
    """Return the one of `engines` to ask, and remember it in `affinity`; of equally busy ones the first."""
    idlest = min(engines, key=lambda engine: engine.in_flight)
    home = affinity.engine
    if home is None or home not in engines:
        home = idlest
    is_much_busier = home.in_flight - idlest.in_flight > _MORE_SEQUENCES
    if is_much_busier and home.in_flight > _MORE_TIMES * idlest.in_flight:
        home = idlest
    affinity.engine = home
    return home


class InferenceClient:
    """One client for all engines that serve one model; an async context manager.

    Args:
        run_dir: of the run that owns the servers from the first push on; None: nothing will be pushed.
        key: of `config`, for errors.
        vocab_size: of the policy; None: only the sign of sampled ids is checked.
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
        self.pool = EnginePool(
            [
                Engine(
                    url.rstrip("/"),
                    self._transport,
                    key=key,
                    ready_timeout_s=config.ready_timeout_s,
                    max_concurrency=config.max_concurrency,
                )
                for url in config.urls
            ]
        )
        self.lease = Lease(self.pool, self._transport, run_dir)
        self._ready_timeout_s, self._key = config.ready_timeout_s, key
        self._version: int | None = None
        self._busy = BusyClock()
        # Requests that wait for room on an engine, in their order.
        self._queue = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.pool.close()
        # Before the transport, which sends the heartbeats.
        await self.lease.close()
        await self._transport.close()

    @property
    def engines(self) -> Sequence[Engine]:
        return self.pool.engines

    def counts(self) -> list[EngineCounts]:
        return [engine.counts() for engine in self.engines]

    @property
    def busy_s(self) -> float:
        """Seconds so far in which at least one generation request was in flight."""
        return self._busy.busy_s

    async def wait_until_ready(self, *, model: str, seq_len: int) -> None:
        """Wait for the first server; each must serve `model` and sessions of `seq_len` tokens, now or when it answers.

        Raises InferenceError if no server answers within `ready_timeout_s`, or one serves another model; ConfigError if
        a server's longest session is too short."""
        await self.pool.require(lambda engine: engine.check(model=model, seq_len=seq_len))
        await self.lease.claim_if_begun()

    def expect(self, *, version: int | None, restore: Work) -> None:
        """Accept only answers of policy `version` (None: any) from now on; `restore` mends an engine that was lost."""
        self._version = version
        self.pool.expect(restore)

    async def generate(self, request: GenerateRequest, *, affinity: Affinity | None = None) -> list[Choice]:
        """Return one choice per seed, in the order of the seeds, all sampled by the weights that `request` names.

        Waits until an engine has room: none samples more than `max_concurrency` sequences at once. Raises
        InferenceError if a server refused, or all failed, were away or served other weights for too long."""
        affinity = affinity or Affinity()
        attempts = RetryPolicy(self._ready_timeout_s, key=f"{self._key}.ready_timeout_s")
        failed: Counter[Engine] = Counter()
        while True:
            # An engine that failed once may be well again. After two failures, rather wait for a full engine.
            failing = [engine for engine, times in failed.items() if times > 1]
            async with self._queue:
                there = await self.pool.wait_for_room(len(request.seeds), but=failing)
                engine = choose([engine for engine in there if engine not in failed] or there, affinity)
            # No await from here until `ask` counts the sequences: else others would take the same room.
            epoch = engine.epoch  # if others report the loss first, ours is the same loss
            try:
                return await self.ask(engine, request)
            except Unavailable as failure:
                self.pool.lose(engine, epoch=epoch, failure=failure)
                attempts.count(failure, url=engine.url)
                failed[engine] += 1
                # Another engine is asked at once; pause only before the same one is asked again.
                if failed.keys() >= set(self.pool.there()):
                    await attempts.pause(failure)
                    failed.clear()

    async def ask(self, engine: Engine, request: GenerateRequest) -> list[Choice]:
        """Ask `engine` once. Raises Unavailable without an answer by the right weights, InferenceError if refused."""
        digest = request.weights_digest
        assert digest is not None, "a run names the weights that it asks"
        body = msgspec.json.encode(request)
        try:
            with self._busy.count(), engine.sampling(len(request.seeds)):
                data = await self._transport.post(engine.url, GENERATE_ROUTE, body, most_bytes=largest_answer(request))
        finally:
            self.pool.note_room()
        answer = decode(data, GenerateResponse, url=engine.url)
        # Before the check: a restart explains what it finds.
        engine.note_boot(answer.boot_id)
        choices = check_choices(answer, request, url=engine.url, vocab_size=self.vocab_size)
        for choice in choices:
            self._check_sampled_by(choice, digest)
        return choices

    def _check_sampled_by(self, choice: Choice, digest: str) -> None:
        """Raise Unavailable if other weights sampled a token: the server needs its weights again."""
        version = self._version
        for span in choice.versions:
            if span.digest != digest or version not in (None, span.version):
                raise Unavailable(
                    f"tokens were sampled by policy version {span.version} with digest {span.digest:.80}, asked for "
                    f"was {'the digest' if version is None else f'version {version} with digest'} {digest}",
                    retry_for_s=0.0,  # waiting does not help
                )
