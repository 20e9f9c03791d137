"""Several servers of one policy: who is asked, and what one costs that is lost, comes back, or never does."""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import HTTPException

from holdfast.config.orchestrator import ClientConfig
from holdfast.errors import InferenceError
from holdfast.orchestrator.client import http
from holdfast.orchestrator.client.client import Affinity, InferenceClient, choose
from holdfast.orchestrator.client.http import HttpTransport, Unavailable
from holdfast.orchestrator.client.pool import Engine
from holdfast.process.events import EVENTS_ENV
from holdfast.protocol.inference import GenerateRequest
from holdfast.run import atomic, journal
from holdfast.run.run_dir import RunDir
from tests.runs.processes import HANG_S
from tests.servers.orchestrator_fakes import FakeEngine, make_config, read_rollouts, rollouts_of, run, serving

STEPS = 6
TWO_TURNS = [{"id": "tests.runs.environments:TwoTurns"}]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What a run with one engine makes, which nothing disturbs."""
    return rollouts_of(tmp_path_factory.mktemp("alone"), FakeEngine())


def leave(engine: FakeEngine) -> None:
    """Go away, as a server that is killed: what was in flight is lost, too."""
    engine.is_away = True


def come_back(engine: FakeEngine) -> None:
    """Be started again, with the weights of model.name or with none."""
    engine.version, engine.digest, engine.boot_id, engine.owner = None, None, "second", None
    engine.is_away = False


@dataclass
class LeavingEngine(FakeEngine):
    """Leaves within its request number `leaves_at`, so that this is answered by nobody."""

    leaves_at: int = 0

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if len(self.requests) == self.leaves_at:
            leave(self)
            raise RuntimeError("killed")
        return super()._answer(body)


def test_engines_share_the_work_and_what_they_sample_is_what_one_samples(tmp_path: Path, expected: object) -> None:
    engines = [FakeEngine() for _ in range(3)]
    assert rollouts_of(tmp_path / "three", *engines) == expected
    assert [len(engine.requests) for engine in engines] == [STEPS] * 3, "one group each"
    assert all(engine.pushed == [0, 1, 2, 3, 4] for engine in engines)
    metrics = journal.read_batch(RunDir(tmp_path / "three"), STEPS).metrics
    assert [metrics[f"engine/{number}/requests"] for number in range(3)] == [1.0] * 3
    assert all(metrics[f"engine/{number}/failures"] == 0 < metrics[f"engine/{number}/in_flight"] for number in range(3))


def test_the_next_turns_of_a_session_go_to_the_engine_that_has_its_prefix(tmp_path: Path) -> None:
    engines = [FakeEngine() for _ in range(2)]
    rollouts_of(tmp_path, *engines, environments=TWO_TURNS, problems_per_step=4)
    for engine in engines:
        prompts = [tuple(request["token_ids"]) for request in engine.requests]
        first = {prompt for prompt, request in zip(prompts, engine.requests, strict=True) if len(request["seeds"]) > 1}
        later = [prompt for prompt in prompts if prompt not in first]
        assert first and later
        assert all(any(prompt[: len(begin)] == begin for begin in first) for prompt in later)


def test_the_engine_with_the_least_to_do_is_asked_but_for_a_prefix() -> None:
    transport = HttpTransport(ClientConfig(), key="client")
    home, other = (Engine(url, transport, key="client", ready_timeout_s=1) for url in ("home", "other"))
    engines, affinity = [home, other], Affinity()
    assert choose(engines, affinity) is home and affinity.engine is home
    # At home as many are waited for as would not matter, or as are not many times those of the other.
    for at_home, at_other, chosen in [(16, 0, home), (17, 0, other), (100, 80, home), (100, 60, other)]:
        home.in_flight, other.in_flight, affinity.engine = at_home, at_other, home
        assert choose(engines, affinity) is chosen is affinity.engine and choose(engines, Affinity()) is other
    assert choose([home], affinity) is home, "the other one was lost"


@pytest.mark.parametrize("settings", [{}, {"environments": TWO_TURNS}], ids=["one turn", "two turns"])
def test_a_lost_engine_costs_its_requests_and_comes_back_with_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = rollouts_of(tmp_path / "alone", FakeEngine(), **settings)
    leaving, other = LeavingEngine(leaves_at=2), FakeEngine()
    asked_before = 0

    def return_later() -> None:
        nonlocal asked_before
        if other.version == 2 and leaving.is_away:  # the run went on meanwhile, and weights were pushed
            asked_before = len(leaving.requests)
            come_back(leaving)

    async def wait_for_it(_: int) -> None:
        while other.version == 3 and len(leaving.requests) == asked_before:
            await asyncio.sleep(0.01)
        while other.version == 4 != leaving.version:
            await asyncio.sleep(0.01)

    other.on_update, other.on_generate = return_later, wait_for_it
    # One group at a time for each of the two: what this one has not begun is for that which comes back.
    assert rollouts_of(tmp_path / "two", leaving, other, client={"max_concurrency": 4}, **settings) == expected
    assert leaving.boot_id == "second" and other.pushed == [0, 1, 2, 3, 4], "nothing was pushed anew to the other one"
    assert leaving.pushed[0] == 0 and set(leaving.pushed[1:]) in ({2, 3, 4}, {3, 4})
    assert len(leaving.requests) > asked_before >= 2, "it was asked again"
    metrics = [journal.read_batch(RunDir(tmp_path / "two"), step).metrics for step in range(1, STEPS + 1)]
    assert sum(line["engine/0/failures"] for line in metrics) == 1
    assert sum(line["engine/1/failures"] for line in metrics) == 0


@pytest.mark.parametrize("returns", [False, True], ids=["gone for good", "started again"])
@pytest.mark.parametrize("is_answered", [False, True], ids=["unanswered", "answered"])
@pytest.mark.parametrize("phase", ["on_claim", "before_update", "on_update"])
def test_an_engine_that_is_lost_in_any_phase_of_a_push_holds_up_nobody(
    phase: str, is_answered: bool, returns: bool, tmp_path: Path, expected: object
) -> None:
    leaving, other = FakeEngine(), FakeEngine()
    is_hit = False

    def hit() -> None:
        nonlocal is_hit
        if len(leaving.pushed) == (0 if phase == "on_claim" else 2) and not is_hit:
            is_hit = True
            (come_back if returns else leave)(leaving)
            if not is_answered:
                raise HTTPException(503, "nobody there")

    async def hit_in_claim() -> None:
        hit()

    async def wait_for_it(_: int) -> None:
        while is_hit and returns and leaving.version != other.version:
            await asyncio.sleep(0.01)

    setattr(leaving, phase, hit_in_claim if phase == "on_claim" else hit)
    other.on_generate = wait_for_it
    assert rollouts_of(tmp_path / "two", leaving, other) == expected
    assert is_hit and other.pushed == [0, 1, 2, 3, 4], "nothing was pushed anew to the other one"
    assert leaving.pushed[-1] == 4 if returns else len(leaving.pushed) <= 3


def test_all_engines_may_be_away_for_a_while(tmp_path: Path, expected: object) -> None:
    class Returning(LeavingEngine):
        def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
            try:
                return super()._answer(body)
            finally:
                if all(engine.is_away for engine in engines):
                    for engine in engines:
                        come_back(engine)

    engines = [Returning(leaves_at=3), Returning(leaves_at=3)]
    assert rollouts_of(tmp_path / "two", *engines) == expected
    assert all(engine.boot_id == "second" for engine in engines)


def test_engines_that_stay_away_end_the_run(tmp_path: Path, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = {"ready_timeout_s": 0.2, "timeout_s": 60}
    monkeypatch.setenv(EVENTS_ENV, str(tmp_path / "events.jsonl"))
    leaving, other = LeavingEngine(leaves_at=1), FakeEngine()
    other.on_generate = lambda _: asyncio.sleep(0.3)
    assert rollouts_of(tmp_path / "one", leaving, other, client=impatient) == expected
    phases = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (warning,) = [event for event in phases if event["phase"].startswith("WARNING")]
    assert warning["url"] == leaving.url and "continues without an inference server" in warning["phase"]
    engines = [LeavingEngine(leaves_at=2), LeavingEngine(leaves_at=2)]
    said = r"did not become ready within 0\.2 s \(client\.ready_timeout_s\)"
    with pytest.raises(InferenceError, match=said) as ended:
        rollouts_of(tmp_path / "none", *engines, client=impatient)
    assert ended.value.exit_code == 3


@pytest.mark.parametrize(("field", "value", "reason"), [
    ("model", "a/b", "serves the model 'a/b'"), ("owner", "another run", "owned by the run in node:/elsewhere"),
])  # fmt: skip
def test_an_engine_that_comes_and_is_another_ends_the_run(tmp_path: Path, field: str, value: str, reason: str) -> None:
    late, other = FakeEngine(is_away=True), FakeEngine()

    def return_changed() -> None:
        if other.version == 1:
            come_back(late)
            setattr(late, field, value)

    other.on_update = return_changed
    with pytest.raises(InferenceError, match=reason):
        rollouts_of(tmp_path, late, other, max_steps=10_000)


def test_an_engine_that_answers_wrong_again_and_again_is_asked_less_and_less(tmp_path: Path, expected: object) -> None:
    """It takes the weights and says so, and then samples with others: nothing of that is kept."""
    liar, honest = FakeEngine(admits_everything=True, lie_about_rollouts=2), FakeEngine()
    assert rollouts_of(tmp_path / "two", liar, honest) == expected
    metrics = [journal.read_batch(RunDir(tmp_path / "two"), step).metrics for step in range(1, STEPS + 1)]
    assert sum(line["engine/0/failures"] for line in metrics) >= 1


def test_one_of_two_teachers_may_be_lost(tmp_path: Path) -> None:
    policy, leaving, other = FakeEngine(), LeavingEngine(leaves_at=3), FakeEngine()
    for one in (leaving, other):
        one.model, one.version, one.digest = "the/teacher", 0, "fixed"

    def judged(directory: Path, *teachers: FakeEngine) -> object:
        teacher = {"urls": [one.url for one in teachers], "model": "the/teacher", "mode": "logprobs"}
        run(make_config(directory, policy, max_steps=STEPS, teacher=teacher | {"ready_timeout_s": HANG_S}))
        return read_rollouts(RunDir(directory), range(1, STEPS + 1))

    with serving(policy, leaving, other):
        assert judged(tmp_path / "two", leaving, other) == judged(tmp_path / "one", other)
    assert 3 <= len(leaving.requests) < len(other.requests) and leaving.pushed == []


def test_weights_that_are_gone_when_an_engine_comes_back_are_not_missed(tmp_path: Path, expected: object) -> None:
    """The trainer removes a version that no batch needs any more, and the next one is still to be published."""
    leaving, other = LeavingEngine(leaves_at=2), FakeEngine()
    weights = RunDir(tmp_path / "two").weights_of(1)
    missed: list[int | None] = []
    taken_before: list[int] = []  # version 1 among them, where it left only after that was pushed

    def refuse_what_is_gone() -> None:
        if not missed and other.version == 1 and not weights.exists():  # the next push may be quicker than the other's
            missed.append(other.version)
            raise HTTPException(409, f"{weights} is not there")

    async def remove_and_return(_: int) -> None:
        if other.version == 1 and leaving.is_away:
            atomic.remove_directory(weights)
            taken_before[:] = leaving.pushed
            come_back(leaving)
            while not missed:
                await asyncio.sleep(0.01)

    leaving.before_update, other.on_generate = refuse_what_is_gone, remove_and_return
    assert rollouts_of(tmp_path / "two", leaving, other) == expected
    assert missed and 1 not in leaving.pushed[len(taken_before) :]


def test_weights_an_engine_could_not_take_end_nothing_when_newer_ones_come(tmp_path: Path, expected: object) -> None:
    """Nobody else is there at that moment, as the other engine is lost when it has taken the newer ones."""
    leaving, other = LeavingEngine(leaves_at=2), FakeEngine()
    begun: list[str] = []
    refused: list[str] = []

    async def wait_for_it(_: int) -> None:
        while other.version == 1 and not begun:
            await asyncio.sleep(0.01)

    def refuse_what_is_gone() -> None:
        if leaving.boot_id == "first" or refused:
            return
        begun.append(leaving.url)
        deadline = time.monotonic() + HANG_S
        while not other.is_away and time.monotonic() < deadline:
            time.sleep(0.01)
        refused.append(leaving.url)
        raise HTTPException(409, "not there")

    def take_turns() -> None:
        if other.version == 1 and leaving.is_away:
            come_back(leaving)
        if other.version == 2 and not refused:
            leave(other)

    leaving.before_update, other.on_update = refuse_what_is_gone, take_turns
    leaving.on_update = lambda: come_back(other) if other.is_away else None
    other.on_generate = wait_for_it
    assert rollouts_of(tmp_path / "two", leaving, other) == expected
    assert refused and other.boot_id == "second"


def test_weights_that_an_engine_refused_do_not_fail_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    """The next ones are wanted in the turn of the event loop in which the refusal ends the recovery."""
    engine = FakeEngine(version=0, digest="served")

    async def lose_and_expect() -> None:
        async with InferenceClient(ClientConfig(urls=[engine.url])) as client:
            pool, (lost,) = client.pool, client.engines

            async def take(_: Engine) -> None: ...

            async def refuse(_: Engine) -> None:
                asyncio.get_running_loop().call_soon(pool.expect, take)
                raise InferenceError("refused")

            pool.expect(refuse)
            pool.lose(lost, epoch=0, failure=Unavailable("gone"))
            async with asyncio.timeout(HANG_S):
                assert await pool.wait_for_any() == [lost]

    with serving(engine):
        asyncio.run(lose_and_expect())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_each_engine_gets_its_share_at_most_while_others_are_away() -> None:
    away, there = FakeEngine(is_away=True), FakeEngine(version=0, digest="served")
    in_flight: list[int] = []

    async def ask_at_once(sizes: Sequence[int]) -> list[int]:
        async with InferenceClient(ClientConfig(urls=[away.url, there.url], max_concurrency=4)) as client:
            there.on_generate = lambda _: in_flight.append(client.engines[1].in_flight)
            fields: dict[str, Any] = {"max_tokens": 3, "stop_token_ids": [3], "weights_digest": "served"}
            asked = [GenerateRequest(token_ids=[5], seeds=list(range(size)), **fields) for size in sizes]
            return [len(choices) for choices in await asyncio.gather(*map(client.generate, asked))]

    sizes = [2, 1, 1, 1, 3, 6, 2, 2, 2]
    with serving(away, there):
        assert asyncio.run(ask_at_once(sizes)) == sizes
    assert max({*in_flight} - {6}) == 4 and in_flight.count(6) == 1, "what is more than its share goes to it alone"
    assert [len(request["seeds"]) for request in there.requests].index(6) <= 5, "small ones that came later overtook it"


def test_every_request_in_flight_has_a_connection_and_few_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp by itself has 100 connections at most, all of which it may open at once."""
    engine = FakeEngine(version=0, digest="served")
    open_connection, number, opening, most = aiohttp.TCPConnector._create_connection, 150, 0, 0
    all_are_there, of_server = asyncio.Event(), list[asyncio.AbstractEventLoop]()

    async def count(*arguments: Any) -> Any:
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        try:
            await asyncio.sleep(0)
            return await open_connection(*arguments)
        finally:
            opening -= 1

    async def wait_for_all(arrived: int) -> None:
        of_server.append(asyncio.get_running_loop())
        if arrived == number:
            all_are_there.set()
        await all_are_there.wait()

    async def ask_at_once() -> None:
        async with InferenceClient(ClientConfig(urls=[engine.url])) as client, asyncio.timeout(HANG_S):
            asked = GenerateRequest(token_ids=[5], seeds=[1], max_tokens=3, stop_token_ids=[3], weights_digest="served")
            await asyncio.gather(*(client.generate(asked) for _ in range(number)))

    engine.on_generate = wait_for_all
    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", count)
    monkeypatch.setattr(http, "_OPENED_AT_ONCE", 8)
    with serving(engine):
        try:
            asyncio.run(ask_at_once())
        finally:
            of_server[0].call_soon_threadsafe(all_are_there.set)
    assert most == 8
