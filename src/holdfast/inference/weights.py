"""Which weights the engine serves, and the one way to change them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.inference.access import Ownership, RequestError
from holdfast.inference.metrics import ServerMetrics
from holdfast.process.heartbeat import does
from holdfast.protocol.inference import OTHER_WEIGHTS, UNREADABLE, Owner, UpdateResponse

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from holdfast.inference.worker import StageResult


_log = logging.getLogger("inference")

_LABEL_SEPARATOR = ":"
_STAGE_POLL_S = 0.25


class EngineWeights:
    """The weights of one engine.

    Attributes:
        version: the policy version that serves; None before the first weights.
        digest: `holdfast.run.weights` of the bytes that the worker loaded.
        num_updates: how often the weights were replaced.
        boot_id: of this server's process: a restarted server has another.
        paused: `/pause` was asked for, and no `/resume` yet.
    """

    def __init__(
        self, engine: AsyncLLM, metrics: ServerMetrics, ownership: Ownership, *, update_timeout_s: float = math.inf
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._ownership = ownership
        self._update_timeout_s = update_timeout_s if math.isfinite(update_timeout_s) else None
        # Updates and pauses one after the other: a resume in the middle would run a half-written model.
        self._lock = asyncio.Lock()
        self.version: int | None = None
        self.digest: str | None = None
        self.num_updates = 0
        self.boot_id = uuid.uuid4().hex
        self.paused = False

    async def adopt_initial(self) -> None:
        """Take what the engine loaded at its start as version 0."""
        digests: list[str | None] = await self._engine.collective_rpc("loaded_digest")
        await self._adopt(0, _agreed(digests))

    async def pause(self) -> None:
        """Freeze generation; requests in flight and new ones wait for `resume`."""
        async with self._lock:
            await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            self.paused = True

    async def resume(self) -> None:
        """Go on generating."""
        async with self._lock:
            await self._engine.resume_generation()
            self.paused = False

    def require(self, digest: str) -> None:
        """Refuse a request that is meant for other weights than those that serve.

        Raises:
            RequestError: 409.
        """
        if digest != self.digest:
            raise RequestError(
                409,
                f"the request is for weights with digest {digest}; version {self.version} serves, with digest "
                f"{self.digest}",
                code=OTHER_WEIGHTS,
            )

    async def update(self, directory: Path, *, version: int, owner: Owner | None) -> UpdateResponse:
        """Replace the weights by those in `directory`. Requests in flight go on with the new ones.

        The directory is read and checked while the old weights keep serving. Then the engine is
        frozen, all cached keys and values are dropped (they belong to the old weights), the
        weights are swapped, and generation goes on.

        Raises:
            RequestError: 409, the directory cannot be used, or the server is another run's; 507, the storage
                fails; nothing has changed.
        """
        async with self._lock:
            # Under the lock: who owns the server may change while another update goes on.
            self._ownership.claim(owner)
            started = time.perf_counter()
            does(f"reading policy version {version}", bound_s=self._update_timeout_s)
            try:
                await self._stage(directory, version)
                does(f"taking policy version {version}", bound_s=self._update_timeout_s, answers=False)
                # Not AsyncLLM.pause_generation: it sleeps 20 ms after the engine has confirmed.
                await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
                # Before the swap: `generate` must not miss a change under its prompt.
                self.num_updates += 1
                digests: list[str | None] = await self._engine.collective_rpc("apply_weights")
                await self._adopt(version, _agreed(digests))
                # Whoever paused it says when it goes on.
                if not self.paused:
                    await self._engine.resume_generation()
            finally:
                does("serving")
            seconds = time.perf_counter() - started
        self._metrics.weight_update(seconds)
        _log.info("serving policy version %d from %s after %.0f ms", version, directory, seconds * 1e3)
        assert self.digest is not None
        return UpdateResponse(version=version, digest=self.digest, seconds=seconds)

    async def _stage(self, directory: Path, version: int) -> None:
        """Have every worker read and check the weights, while the engine goes on.

        Raises:
            RequestError: 409, one refuses them; 507, it could not read them.
        """
        staged: list[StageResult | None] = await self._engine.collective_rpc(
            "stage_weights", args=(str(directory), version)
        )
        # Asked again and again: a call that waits would hold up the engine.
        while any(result is None for result in staged):
            await asyncio.sleep(_STAGE_POLL_S)
            staged = await self._engine.collective_rpc("staged_weights")
        results = [result for result in staged if result is not None]
        for result in results:
            # First: what could not be read may be right, and may be tried again.
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
