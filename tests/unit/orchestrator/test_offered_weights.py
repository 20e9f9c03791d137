"""Weights that the trainer offers before their directory is there: who takes them, and who gets the directory."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import CheckpointError, InferenceError
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import Unavailable
from holdfast.orchestrator.client.pool import EngineLost
from holdfast.orchestrator.weight_sync import PublishedWeights, WeightPusher
from holdfast.protocol.inference import GenerateRequest
from holdfast.protocol.transfer import Offer
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from tests.runs.processes import HANG_S
from tests.servers.orchestrator_fakes import FakeEngine, make_config, publish_weights, serving

Use = Callable[[InferenceClient, WeightPusher], Awaitable[None]]
CONTENT = b"one"


@pytest.fixture
def digest(tmp_path: Path) -> str:
    elsewhere = RunDir(tmp_path / "elsewhere")
    publish_weights(elsewhere, 1, CONTENT)
    return weights_digest(elsewhere.weights_of(1))


@pytest.fixture
def run_dir(tmp_path: Path, digest: str) -> RunDir:
    """A run whose trainer offers version 1."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.weights.mkdir()
    run_dir.offer.write_bytes(msgspec.json.encode(Offer(1, digest, "127.0.0.1:1", 1.0)))
    return run_dir


def drive(run_dir: RunDir, use: Use, *engines: FakeEngine) -> None:
    async def run() -> None:
        async with InferenceClient(make_config(run_dir.path, *engines).client, run_dir=run_dir) as client:
            await use(client, WeightPusher(client, run_dir, timeout_s=HANG_S, seq_len=64))

    with serving(*engines):
        asyncio.run(run())


async def serve(pusher: WeightPusher, check: Callable[[], None] = lambda: None) -> PublishedWeights:
    return await pusher.serve(await pusher.wait_for(1, check=check), check=check)


def test_every_worker_of_every_engine_has_a_rank(run_dir: RunDir, digest: str) -> None:
    two, has_it, one = FakeEngine(num_workers=2), FakeEngine(version=1, digest=digest), FakeEngine()

    async def use(client: InferenceClient, pusher: WeightPusher) -> None:
        served = await serve(pusher)
        assert (served.version, served.digest, served.written) == (1, digest, None)

    drive(run_dir, use, two, has_it, one)
    assert (two.transfers, has_it.transfers, one.transfers) == ([(1, 4)], [], [(3, 4)])
    assert {engine.digest for engine in (two, has_it, one)} == {digest}


def test_a_torn_engine_gets_the_directory_once_it_is_there(run_dir: RunDir, digest: str) -> None:
    torn, well = FakeEngine(tears_weights=True), FakeEngine()

    def publish() -> None:
        if torn.transfers:  # the trainer writes the directory after the transfer
            publish_weights(run_dir, 1, CONTENT)

    async def use(client: InferenceClient, pusher: WeightPusher) -> None:
        assert (await serve(pusher, publish)).written is not None

    drive(run_dir, use, torn, well)
    assert (torn.transfers, well.transfers, torn.pushed, well.pushed) == ([(1, 3)], [(2, 3)], [1], [1])
    assert (torn.digest, well.digest) == (digest, digest)


def test_an_engine_that_comes_back_waits_for_the_directory(run_dir: RunDir, digest: str) -> None:
    engine = FakeEngine()

    async def use(client: InferenceClient, pusher: WeightPusher) -> None:
        await serve(pusher)
        engine.version = engine.digest = None  # it was restarted
        request = GenerateRequest(token_ids=[1], seeds=[8], max_tokens=4, stop_token_ids=[3], weights_digest=digest)
        answer = asyncio.create_task(client.generate(request))
        while client.pool.there():
            await asyncio.sleep(0.005)
        publish_weights(run_dir, 1, CONTENT)
        assert len(await answer) == 1

    drive(run_dir, use, engine)
    assert (engine.transfers, engine.pushed, engine.digest) == ([(1, 2)], [1, 1], digest)


def test_a_server_that_comes_back_with_another_owner_ends_the_run(run_dir: RunDir, digest: str) -> None:
    stays, taken = FakeEngine(), FakeEngine()

    async def use(client: InferenceClient, pusher: WeightPusher) -> None:
        await serve(pusher)
        publish_weights(run_dir, 1, CONTENT)
        taken.owner, taken.version, taken.boot_id = "another run", None, "second"
        engine = client.engines[1]
        client.pool.lose(engine, epoch=engine.epoch, failure=Unavailable("it died"))
        async with asyncio.timeout(HANG_S):
            while True:
                await client.pool.wait_for_any()
                await asyncio.sleep(0.005)

    with pytest.raises(InferenceError, match="owned by the run in") as error:
        drive(run_dir, use, stays, taken)
    assert not isinstance(error.value, EngineLost)


def test_offers_of_other_weights_are_left_alone(run_dir: RunDir) -> None:
    engine = FakeEngine()
    publish_weights(run_dir, 1, b"others")  # by an attempt after the one whose offer is left

    async def use(client: InferenceClient, pusher: WeightPusher) -> None:
        assert (await serve(pusher)).written is not None
        run_dir.offer.write_bytes(b"{")
        with pytest.raises(CheckpointError, match=r"offer\.json is damaged"):
            await serve(pusher)

    drive(run_dir, use, engine)
    assert (engine.transfers, engine.digest) == ([], weights_digest(run_dir.weights_of(1)))
