"""What a server says about its health while weights arrive, after they were torn, and when its engine has died."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.inference.access import Ownership, RequestError
from holdfast.inference.routes import Routes
from holdfast.inference.weights import EngineWeights, ServerMetrics
from tests.runs.processes import HANG_S


class Engine:
    """Stands for vLLM's client and for the sampler: a paused engine keeps what it is asked for."""

    max_len, vocab_size, died = 16, 16, ConnectionError

    def __init__(self, *applied: dict[str, str | None]) -> None:
        self.engine_core = self
        self.has_died = False
        self.running = asyncio.Event()
        self.running.set()
        self.applied = list(applied)
        self.while_frozen: Callable[[], Awaitable[None]] | None = None

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.running.clear()

    async def resume_generation(self) -> None:
        self.running.set()

    async def update_weight_version(self, label: str) -> None: ...

    async def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, str | None]]:
        if method == "stage_weights":
            return [{"refused": None, "unreadable": None}] * 2
        if self.while_frozen is not None:
            await self.while_frozen()
        return self.applied

    async def probe(self, *, generates: bool) -> None:
        if generates:
            await self.running.wait()


def served(engine: Engine) -> tuple[EngineWeights, Routes]:
    """Return an engine's weights, version 3, and its routes."""
    metrics, ownership = ServerMetrics(), Ownership(90.0)
    weights = EngineWeights(engine, metrics, ownership)  # type: ignore[arg-type] - it has what is asked here
    weights.version, weights.digest = 3, "d3"
    routes = Routes(
        engine,  # type: ignore[arg-type]
        engine_weights=weights,
        ownership=ownership,
        metrics=metrics,
        model_name="m",
        health_timeout_s=HANG_S,
    )
    return weights, routes


async def health(routes: Routes) -> tuple[int, bytes]:
    answer = await routes.health(None)  # type: ignore[arg-type] - it asks for nothing
    return answer.status_code, bytes(answer.body)


async def torn(weights: EngineWeights) -> str:
    with pytest.raises(RequestError) as error:
        await weights.update(Path("step_4"), version=4, owner=None)
    assert (error.value.status, error.value.code, weights.version, weights.digest) == (503, "torn", None, None)
    return str(error.value)


def test_a_torn_server_is_healthy_though_a_probe_of_its_frozen_engine_has_no_end() -> None:
    async def run() -> None:
        engine = Engine({"torn": "no bytes came for 60 s", "digest": None})
        weights, routes = served(engine)

        async def probed() -> None:
            with pytest.raises(TimeoutError):  # the caller gives up, its probe stays
                async with asyncio.timeout(0.05):
                    await health(routes)

        engine.while_frozen = probed
        assert "their transfer broke off: no bytes came for 60 s" in await torn(weights)
        assert (await health(routes))[0] == 200, "the weights that mend it are pushed to healthy servers only"
        engine.while_frozen, engine.applied = None, [{"torn": None, "digest": "d4"}] * 2
        await weights.update(Path("step_4"), version=4, owner=None)
        assert (await health(routes))[0] == 200 and engine.running.is_set()

    asyncio.run(run())


def test_workers_with_different_weights_sample_nothing_until_they_agree() -> None:
    async def run() -> None:
        engine = Engine({"torn": None, "digest": "d4"}, {"torn": None, "digest": "d5"})
        weights, _ = served(engine)
        assert "the workers loaded different weights" in await torn(weights) and not engine.running.is_set()
        engine.applied = [{"torn": None, "digest": "d5"}] * 2
        await weights.update(Path("step_5"), version=5, owner=None)
        assert (weights.version, weights.digest, weights.torn, engine.running.is_set()) == (5, "d5", "", True)

    asyncio.run(run())


def test_a_dead_engine_is_no_engine_to_ask() -> None:
    async def run() -> None:
        engine = Engine()
        _, routes = served(engine)
        engine.has_died = True
        status, body = await health(routes)
        assert status == 503 and b"the engine died" in body

    asyncio.run(run())
