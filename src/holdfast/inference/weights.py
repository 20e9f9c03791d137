"""Which weights the engine serves, the one way to change them, and the counters of the server for `/metrics`."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.inference.access import Ownership, RequestError
from holdfast.process.heartbeat import BusyClock, does
from holdfast.protocol.inference import OTHER_WEIGHTS, TORN, UNREADABLE, Owner, UpdateResponse
from holdfast.protocol.transfer import Transfer

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from holdfast.inference.worker import ApplyResult, StageResult


_log = logging.getLogger("inference")

_LABEL_SEPARATOR = ":"
_STAGE_POLL_S = 0.25


class ServerMetrics(Collector):
    """Counters of one server. Busy is the time with at least one generation request in flight. `last_progress`:
    monotonic time in seconds of the engine's last output; 0.0 before the first."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy = BusyClock()
        self._requests = 0
        self._tokens = 0
        self._updates = 0
        self._update_s = 0.0
        self.last_progress = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a generation request while the block runs."""
        self._requests += 1
        with self._busy.count():
            yield

    def weight_update(self, seconds: float) -> None:
        """Count a weight update that took `seconds`."""
        self._updates += 1
        self._update_s += seconds

    def sampled(self, num_tokens: int) -> None:
        """Count tokens that the engine has just sampled."""
        self.last_progress = time.monotonic()
        self._tokens += num_tokens

    def watch(self, engine_core: Any) -> None:
        """Count every token that comes out of vLLM's engine client, for all routes."""
        get_output = engine_core.get_output_async

        async def counted() -> Any:
            outputs = await get_output()
            if outputs.outputs:
                self.sampled(sum(len(output.new_token_ids) for output in outputs.outputs))
            return outputs

        engine_core.get_output_async = counted

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus at each scrape."""
        busy = self._busy.busy_s
        idle = time.monotonic() - self._started - busy
        for name, text, value in (
            ("engine_busy_seconds", "Time with at least one generation request in flight", busy),
            ("engine_idle_seconds", "Time without a generation request", idle),
            ("generated_tokens", "Tokens sampled by the engine", self._tokens),
            ("generation_requests", "Generation requests, finished or not", self._requests),
            ("weight_updates", "Weight updates applied", self._updates),
            ("weight_update_seconds", "Time spent in applied weight updates", self._update_s),
        ):
            yield CounterMetricFamily(f"holdfast_{name}", text, value=value)
        in_flight = self._busy.in_flight
        yield GaugeMetricFamily("holdfast_requests_in_flight", "Generation requests in flight", value=in_flight)


class EngineWeights:
    """The weights of one engine.

    Attributes:
        version: the policy version that serves; None before the first weights.
        digest: `holdfast.run.weights` of the bytes that the worker loaded.
        torn: why the model is not one version, or "". Such a model never samples: the engine stays paused, and
            the next whole update mends it.
        num_updates: how often the weights were replaced.
        boot_id: of this server's process. A restarted server has another id.
        num_workers: processes that have a part of the model each.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        metrics: ServerMetrics,
        ownership: Ownership,
        *,
        update_timeout_s: float = math.inf,
        num_workers: int = 1,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._ownership = ownership
        self._update_timeout_s = update_timeout_s if math.isfinite(update_timeout_s) else None
        self._lock = asyncio.Lock()
        self.version: int | None = None
        self.digest: str | None = None
        self.torn = ""
        self.num_updates = 0
        self.boot_id = uuid.uuid4().hex
        self.num_workers = num_workers

    async def adopt_initial(self) -> None:
        """Call the weights that the engine loaded at its start version 0."""
        digests: list[str | None] = await self._engine.collective_rpc("loaded_digest")
        await self._adopt(0, _agreed(digests))

    @property
    def none_because(self) -> str:
        """Why no weights serve, if `version` is None."""
        if self.torn:
            return f"the weights are torn, as {self.torn}. The server waits for the next POST /update_weights"
        return "no weights yet: the server waits for its first POST /update_weights"

    def require(self, digest: str) -> None:
        """Raise RequestError (409) if other weights than `digest` serve."""
        if digest != self.digest:
            raise RequestError(
                409,
                f"the request is for weights with digest {digest}; version {self.version} serves, with digest "
                f"{self.digest}",
                code=OTHER_WEIGHTS,
            )

    async def update(
        self, directory: Path, *, version: int, owner: Owner | None, transfer: Transfer | None = None
    ) -> UpdateResponse:
        """Replace the weights by the weights in `directory`. Requests in flight continue with the new weights.

        The workers read and check the directory while the old weights serve. Then the engine is frozen, drops all
        cached keys and values, since they belong to the old weights, swaps the weights, and continues. `transfer`: the
        weights come from there. The workers join while the old weights serve, and receive the weights into the frozen
        model. Raise RequestError: 409 if the directory or the transfer cannot be used, or another run owns the server;
        507 if the storage fails. Nothing has changed then. 503 with `torn` if the transfer broke off, or the workers
        differ."""
        async with self._lock:
            # Under the lock: the owner may change during another update.
            self._ownership.claim(owner)
            started = time.perf_counter()
            does(f"reading policy version {version}", bound_s=self._update_timeout_s)
            try:
                await self._stage(directory, version, transfer)
                does(f"taking policy version {version}", bound_s=self._update_timeout_s, answers=False)
                # Not AsyncLLM.pause_generation: it sleeps 20 ms after the engine has confirmed.
                await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
                # Before the swap: `/generate` must not miss an update during its prompt.
                self.num_updates += 1
                applied: list[ApplyResult] = await self._engine.collective_rpc("apply_weights")
                digests = {result["digest"] for result in applied}
                broken_off = [result["torn"] for result in applied if result["torn"] is not None]
                if broken_off:
                    self.torn = f"their transfer broke off: {broken_off[0]}"
                else:  # workers differ if the directory was replaced while they read it
                    self.torn = f"the workers loaded different weights: {digests}" if len(digests) > 1 else ""
                if self.torn:
                    self.version = self.digest = None
                    _log.warning("the weights are torn, as %s", self.torn)
                    raise RequestError(503, self.none_because, code=TORN)
                await self._adopt(version, _agreed([result["digest"] for result in applied]))
                await self._engine.resume_generation()
            finally:
                does("waiting for whole weights" if self.torn else "serving")
            seconds = time.perf_counter() - started
        self._metrics.weight_update(seconds)
        source = directory if transfer is None else transfer.offer.address
        _log.info("serving policy version %d from %s after %.0f ms", version, source, seconds * 1e3)
        assert self.digest is not None
        return UpdateResponse(version=version, digest=self.digest, seconds=seconds)

    async def _stage(self, directory: Path, version: int, transfer: Transfer | None) -> None:
        """Have every worker read and check the weights, or join the transfer, while the engine continues."""
        encoded = None if transfer is None else msgspec.json.encode(transfer).decode()
        staged: list[StageResult | None] = await self._engine.collective_rpc(
            "stage_weights", args=(str(directory), version, encoded)
        )
        # Polled: a call that waits would block the engine.
        while any(result is None for result in staged):
            await asyncio.sleep(_STAGE_POLL_S)
            staged = await self._engine.collective_rpc("staged_weights")
        results = [result for result in staged if result is not None]
        for result in results:
            # Before refusals: unreadable weights may be right, and the orchestrator tries again.
            if result["unreadable"] is not None:
                raise RequestError(
                    507,
                    f"version {self.version} keeps serving, as the storage failed: {result['unreadable']}",
                    code=UNREADABLE,
                )
        for result in results:
            if result["refused"] is not None:
                raise RequestError(409, f"weights refused, version {self.version} keeps serving: {result['refused']}")

    async def _adopt(self, version: int, digest: str) -> None:
        await self._engine.update_weight_version(f"{version}{_LABEL_SEPARATOR}{digest}")
        self.version, self.digest = version, digest


def read_label(label: str) -> tuple[int, str]:
    """Return version and digest of the weights that the engine calls `label`: it puts that on every token."""
    version, _, digest = label.partition(_LABEL_SEPARATOR)
    return int(version), digest


def _agreed(digests: list[str | None]) -> str:
    digest = digests[0]
    assert digest is not None and set(digests) == {digest}, f"workers loaded different weights: {digests}"
    return digest
