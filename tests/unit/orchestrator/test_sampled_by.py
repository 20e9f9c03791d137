"""Who sampled what: an engine that was restarted, or that somebody else pushed to, is noticed and never trained on."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import HTTPException

from holdfast.config.orchestrator import ClientConfig
from holdfast.errors import InferenceError
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import HttpTransport, Unavailable, _new_socket
from holdfast.orchestrator.weight_sync import describe_weights
from holdfast.run import journal
from holdfast.run.manifest import read_manifest
from holdfast.run.run_dir import RunDir
from tests.runs.processes import HANG_S
from tests.servers.orchestrator_fakes import FakeEngine, make_config, rollouts_of, run, serving

STEPS = 6
TWO_TURNS = [{"id": "tests.runs.environments:TwoTurns"}]


def restarted(engine: FakeEngine) -> None:
    """The server came back with `load = auto`: it serves the files of model.name as its version 0."""
    engine.version, engine.digest, engine.boot_id = 0, "of model.name, not of the run", "second"


def pushed_to(engine: FakeEngine) -> None:
    """Another run pushed its weights of the same number."""
    engine.digest = "of another run"


class DisturbedEngine(FakeEngine):
    """`disturb` happens after answer `number`: no request is in flight then, if that is the last of a batch or turn."""

    number = 0
    disturb: Callable[[FakeEngine], None] | None = None
    answers = 0

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._answer(body)
        self.answers += 1
        if self.answers == self.number and self.disturb is not None:
            self.disturb(self)
        return answer


# A batch is three requests, one per group; of two turns: three, and then one per sample.
_DISTURBANCES: dict[str, tuple[Callable[[FakeEngine], None], int, dict[str, Any]]] = {
    "restarted between two batches of version 0": (restarted, 3, {}),
    "restarted within a later batch": (restarted, 13, {}),
    "pushed to under the same number": (pushed_to, 13, {}),
    "restarted between two turns of version 0": (restarted, 3, {"environments": TWO_TURNS}),
    "restarted between two later turns": (restarted, 3 * 15 + 3, {"environments": TWO_TURNS}),
}


@pytest.mark.parametrize("disturbance", _DISTURBANCES)
def test_what_others_sampled_is_sampled_again(tmp_path: Path, disturbance: str) -> None:
    disturb, number, settings = _DISTURBANCES[disturbance]
    expected = rollouts_of(tmp_path / "alone", FakeEngine(), **settings)
    engine = DisturbedEngine()
    engine.number, engine.disturb = number, disturb
    assert rollouts_of(tmp_path / "disturbed", engine, **settings) == expected and engine.answers > number
    repeated = [version for version in engine.pushed if engine.pushed.count(version) > 1]
    assert repeated, "the disturbance did not come to pass"
    for step in range(1, STEPS + 1):
        run_dir = RunDir(tmp_path / "disturbed")
        batch = journal.read_batch(run_dir, step)
        assert batch.weights_digest == describe_weights(run_dir, batch.policy_version).digest
        assert read_manifest(run_dir.batch(step)).weights_digest == batch.weights_digest


def test_a_server_that_is_restarted_before_its_weights_are_read_back_gets_them_again(tmp_path: Path) -> None:
    expected = rollouts_of(tmp_path / "alone", FakeEngine())
    engine = FakeEngine()
    disturbances = [restarted]

    def disturb() -> None:
        if engine.version == 1 and disturbances:
            disturbances.pop()(engine)

    engine.on_update = disturb
    assert rollouts_of(tmp_path / "disturbed", engine) == expected
    assert engine.pushed == [0, 1, 1, 2, 3, 4] and not disturbances


def test_a_server_that_keeps_answering_by_other_weights_ends_the_run(tmp_path: Path) -> None:
    engine = FakeEngine(admits_everything=True, lie_about_rollouts=2)
    said = r"lost 5 times .* sampled by policy version 2 .* asked for was version 0"
    with serving(engine), pytest.raises(InferenceError, match=said):
        run(make_config(tmp_path, engine, max_steps=1))
    assert RunDir(tmp_path).published_batches() == []
    assert b"completions" not in RunDir(tmp_path).generations(1).read_bytes(), "what others sampled must not be kept"


def test_a_server_that_another_run_took_over_ends_the_run_with_its_name(tmp_path: Path) -> None:
    engine = FakeEngine()

    def take_over(count: int) -> None:
        if count == 4:
            engine.owner, engine.directory, engine.digest = "another run", "node:/elsewhere", "of another run"

    engine.on_generate = take_over
    with serving(engine), pytest.raises(InferenceError, match="owned by the run in node:/elsewhere") as ended:
        run(make_config(tmp_path, engine))
    assert ended.value.exit_code == 3 and RunDir(tmp_path).published_batches() == [1]


def test_a_server_is_owned_by_the_run_and_given_back_at_its_end(tmp_path: Path) -> None:
    engine = FakeEngine()
    owners = []
    engine.on_generate = lambda _: owners.append(engine.owner)
    with serving(engine):
        run(make_config(tmp_path, engine, max_steps=1))
    run_id = RunDir(tmp_path).run_id()
    assert set(owners) == {run_id}
    assert engine.released == [run_id] and engine.owner is None


@pytest.fixture
def lively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeEngine, RunDir]:
    """Return a server, and a run whose client gives it signs of life without a pause."""
    monkeypatch.setattr("holdfast.orchestrator.client.pool._HEARTBEAT_S", 0.01)
    run_dir = RunDir(tmp_path)
    run_dir.create()
    return FakeEngine(version=0, digest="any"), run_dir


def test_signs_of_life_go_on_after_one_that_failed_and_a_lost_server_is_not_given_back(
    tmp_path: Path, lively: tuple[FakeEngine, RunDir], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="orchestrator")
    engine, run_dir = lively

    async def refuse_some() -> None:
        if engine.claims in (3, 4):
            raise HTTPException(400, "not now")

    engine.on_claim = refuse_some

    async def live() -> None:
        with ExitStack() as stack:
            stack.enter_context(serving(engine))
            async with InferenceClient(make_config(tmp_path, engine).client, run_dir=run_dir) as client:
                await client.wait_until_ready(model=engine.model, seq_len=8)
                while engine.claims < 6:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(stack.close)
                await client.lease.release()

    asyncio.run(live())
    assert caplog.text.count("did not get a heartbeat") >= 2
    assert f"{engine.url} was not given back, so other runs cannot use it yet" in caplog.text


def test_signs_of_life_come_from_the_environments_event_loop(tmp_path: Path, lively: tuple[FakeEngine, RunDir]) -> None:
    engine, run_dir = lively

    async def block() -> None:
        async with InferenceClient(make_config(tmp_path, engine).client, run_dir=run_dir) as client:
            await client.wait_until_ready(model=engine.model, seq_len=8)
            while engine.claims < 3:
                await asyncio.sleep(0.01)
            before = engine.claims
            time.sleep(0.5)
            assert engine.claims <= before + 1, "one was under way"
            while engine.claims < before + 3:
                await asyncio.sleep(0.01)

    with serving(engine):
        asyncio.run(block())


def test_a_sign_of_life_that_is_under_way_takes_nothing_back(tmp_path: Path, lively: tuple[FakeEngine, RunDir]) -> None:
    engine, run_dir = lively
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    async def take_long() -> None:
        begun.set()
        await asyncio.to_thread(go_on.wait, HANG_S)
        asyncio.get_running_loop().call_soon(ended.set)

    async def give_back() -> None:
        async with InferenceClient(make_config(tmp_path, engine).client, run_dir=run_dir) as client:
            await client.wait_until_ready(model=engine.model, seq_len=8)
            engine.on_claim = take_long
            assert await asyncio.to_thread(begun.wait, HANG_S)
            releasing = asyncio.create_task(client.lease.release())
            await asyncio.wait([releasing], timeout=0.5)
            go_on.set()
            await releasing
            assert await asyncio.to_thread(ended.wait, HANG_S)

    with serving(engine):
        asyncio.run(give_back())
    assert len(engine.released) == 1 and engine.owner is None


def test_a_machine_that_is_cut_off_is_asked_for_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it would ever arrive: no end of the connection, and no answer."""
    asked = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
    asked += [(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT)]
    asked += [(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), (socket.IPPROTO_TCP, socket.TCP_SYNCNT)]
    made: list[socket.socket] = []

    def new_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        made.append(_new_socket(address))
        return made[-1]

    async def options_of(url: str) -> list[int]:
        transport = HttpTransport(ClientConfig(urls=[url]), key="client")
        await transport.get(url, "/health")
        options = [made[0].getsockopt(*option) for option in asked]
        await transport.close()
        return options

    monkeypatch.setattr("holdfast.orchestrator.client.http._new_socket", new_socket)
    engine = FakeEngine()
    with serving(engine):
        assert asyncio.run(options_of(engine.url)) == [1, 30, 10, 6, 90_000, 2]


def test_a_frozen_server_is_waited_for_by_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.orchestrator.client.http.PROBE_TIMEOUT_S", 0.05)

    async def ask(url: str) -> None:
        transport = HttpTransport(ClientConfig(urls=[url], timeout_s=0.05), key="client")
        with pytest.raises(Unavailable, match="no answer to POST .*/claim within 0.05 s"):
            await transport.post_as_admin(url, "/claim", b"{}", is_probe=True)
        with pytest.raises(Unavailable, match=r"within 0.05 s \(client.timeout_s\), and is not well"):
            await transport.post_as_admin(url, "/update_weights", b"{}")
        await transport.close()

    with socket.create_server(("127.0.0.1", 0)) as frozen:
        asyncio.run(ask(f"http://127.0.0.1:{frozen.getsockname()[1]}"))
