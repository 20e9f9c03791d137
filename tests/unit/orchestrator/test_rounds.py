"""Batches that are made in rounds: they depend on seeds and tokens alone, whatever is slow or killed."""

import random
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast import Message, TaskSeed
from holdfast.commands.rollouts_trace import trace, way_to
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError, EnvironmentFailure, InferenceError
from holdfast.orchestrator import group_players
from holdfast.orchestrator.env.interface import Score, Session, Task
from holdfast.protocol.rollouts import Rollout
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from tests.runs.environments import TwoTurns
from tests.servers import orchestrator_fakes
from tests.servers.orchestrator_fakes import (
    STOP_TOKEN,
    FakeEngine,
    make_config,
    resumed_of,
    rollouts_of,
    run,
    run_until,
    serving,
)
from tests.unit.orchestrator.test_workers import run as faulty_run

TWO_TURNS = "tests.runs.environments:TwoTurns"
ROUNDS: dict[str, Any] = {"schedule": "rounds", "async_level": 2, "round_tokens": 4}
STOPPING = {"max_tokens": 24, "stop": [one + other for one in "abcdefghijklm" for other in "nopqrstuvwxyz"]}
END = chr(STOP_TOKEN + 92)


class AsksInScore(TwoTurns):
    def score(self, task: Task, sessions: Sequence[Session]) -> Any:
        return sessions[0].sample()


class Uneven(TwoTurns):
    async def run(self, session: Session, task: Task) -> None:
        await session.sample(max_tokens=4)
        for _ in range(11 if task.answer in ("2", "3") else 1):
            session.append_messages([Message("user", "again")])
            await session.sample(max_tokens=4)

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"{seed.number}")], answer=str(seed.index))

    def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(float(len(session.token_ids))) for session in sessions]


class FailsAtOnce(Uneven):
    async def run(self, session: Session, task: Task) -> None:
        if task.answer in ("1", "2", "3"):
            raise KeyError("no")
        await super().run(session, task)


def _in_rounds(directory: Path, *engines: FakeEngine, **changes: Any) -> list[tuple[int, list[Rollout]]]:
    return rollouts_of(directory, *engines, **(ROUNDS | changes))


def test_without_staleness_the_batches_are_those_of_the_strict_schedule(tmp_path: Path) -> None:
    common: dict[str, Any] = {"async_level": 0, "environments": [{"id": TWO_TURNS}, {"id": "reverse_text"}]}
    strict = rollouts_of(tmp_path / "strict", FakeEngine(), schedule="strict", **common)
    for room in (3, 256):
        few: dict[str, Any] = {"client": {"max_concurrency": room}}
        assert rollouts_of(tmp_path / f"rounds_{room}", FakeEngine(), schedule="rounds", **common, **few) == strict


def test_groups_of_several_batches_go_on_side_by_side(tmp_path: Path) -> None:
    made = _in_rounds(tmp_path, FakeEngine(), max_steps=8)
    versions = [[{span.version for span in one.versions} for one in rollouts] for _, rollouts in made]
    assert any(len(found) > 1 for own in versions for found in own), "no answer saw new weights"
    for step, own in enumerate(versions, start=1):
        assert all(max(0, step - 3) <= min(found) and max(found) <= max(0, step - 2) for found in own), (step, own)
        batch = journal.read_batch(RunDir(tmp_path), step)
        assert set(batch.older_digests) == {version for found in own for version in found} - {batch.policy_version}
    everything = [(one.task_id, one.sample_index) for _, rollouts in made for one in rollouts]
    assert len(set(everything)) == len(everything) == 8 * 3 * 4


def test_a_trace_names_the_request_and_the_weights_of_every_sampled_token(tmp_path: Path) -> None:
    engine = FakeEngine()
    made = _in_rounds(tmp_path, engine, max_steps=4)
    asked = {(tuple(one["token_ids"]), seed, one["weights_digest"]) for one in engine.requests for seed in one["seeds"]}
    versions = set[int]()
    for step, (_, rollouts) in enumerate(made, start=1):
        for index, rollout in enumerate(rollouts):
            parts = trace(RunDir(tmp_path), step=str(step), index=index).document["parts"]
            requests = [part["request"] for part in parts]
            told = [(tuple(one["token_ids"]), *one["seeds"]) for one in requests]
            assert all(1 <= one["max_tokens"] <= 4 for one in requests)
            assert all((*one, part["weights_digest"]) in asked for one, part in zip(told, parts, strict=True))
            traced = {place for part in parts for place in range(part["start"], part["end"])}
            assert traced == {place for place, sampled in enumerate(rollout.loss_mask) if sampled}
            versions.add(len({part["version"] for part in parts}))
    assert versions >= {1, 2}


def test_a_trace_asks_again_and_names_what_it_samples_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy is not for the servers of a run
    engine = FakeEngine()
    rollouts_of(tmp_path, engine, max_steps=2, async_level=0)
    with serving(engine):
        again = partial(trace, RunDir(tmp_path), index=1, server=engine.url + "/")
        assert again(step="2").exit_code == 0
        weights = RunDir(tmp_path).weights_of(0)
        with pytest.raises(InferenceError, match="no token of this rollout. .*--model.name .*step_0` serves"):
            again(step="1")
        weights.rename(tmp_path / "removed")
        for _ in range(2):  # without weights, and with those of another version in their place
            with pytest.raises(InferenceError, match="no token of this rollout. .*removed"):
                again(step="1")
            parts = trace(RunDir(tmp_path), step="1", index=1).document["parts"]
            assert [part["weights"] for part in parts] == [None]
            shutil.copytree(RunDir(tmp_path).weights_of(1), weights, dirs_exist_ok=True)
        for name in (ADAPTER_NAME, ADAPTER_CONFIG_NAME):  # no server can be started with it
            (weights / name).touch()
        assert "is an adapter" in way_to([str(weights)])
        engine.alter = lambda body: body["choices"][0].update(token_ids=[9])
        changed = again(step="2")
    assert changed.exit_code == 1 and "samples [[9]]" in changed.problems[0]
    for url in (engine.url, "localhost:8000"):
        with pytest.raises(InferenceError, match="does not answer"):
            again(step="2", server=url)


def test_no_short_group_takes_the_place_of_a_long_group_that_would_be_too_old(tmp_path: Path) -> None:
    one: dict[str, Any] = {"problems_per_step": 1, "group_size": 1, "environments": [{"id": f"{__name__}:Uneven"}]}
    made = _in_rounds(tmp_path, FakeEngine(), async_level=3, seed=1, **one)
    assert [rollout.task_id for _, (rollout,) in made] == [0, 1, 2, 3, 4, 5]
    assert all(step - 1 - rollout.versions[0].version <= 3 for step, (_, (rollout,)) in enumerate(made, start=1))


def test_speed_and_engines_decide_nothing_and_slots_do(tmp_path: Path) -> None:
    straight = _in_rounds(tmp_path / "straight", FakeEngine())
    slow = [FakeEngine(), FakeEngine()]
    chance = random.Random(7)
    for engine in slow:
        engine.on_generate = lambda _: time.sleep(chance.random() / 100)
    assert _in_rounds(tmp_path / "slow", *slow) == straight
    few = {"client": {"max_concurrency": 3}}
    fewer = _in_rounds(tmp_path / "few", FakeEngine(), **few)
    assert fewer == _in_rounds(tmp_path / "again", FakeEngine(), **few) != straight


@pytest.mark.parametrize("killed_at", [3, 17, 40, 71])
def test_a_killed_orchestrator_samples_nothing_twice_and_ends_with_the_same_batches(
    tmp_path: Path, killed_at: int
) -> None:
    """Also with a mix of environments, a curriculum, two turns and stop texts."""
    levels = {"levels": [{"modulus": 1}, {"modulus": 2}], "window": 2, "advance_reward": 0.5}
    graded = {"id": "tests.runs.environments:Graded", "name": "graded", "curriculum": levels}
    common: dict[str, Any] = ROUNDS | {"environments": [{"id": TWO_TURNS}, graded], "sampling": STOPPING}
    undisturbed = FakeEngine()
    straight = rollouts_of(tmp_path / "straight", undisturbed, **common)
    engine = FakeEngine()
    with serving(engine):
        config = make_config(tmp_path / "killed", engine, max_steps=6, **common)
        orchestrator_fakes.publish_weights(RunDir(config.output_dir), 0, b"start")
        run_until(killed_at, engine, config)
        run(config)
    assert orchestrator_fakes.read_rollouts(RunDir(tmp_path / "killed"), range(1, 7)) == straight
    most_in_flight = 3 * 3 * 4
    assert {one.level for _, rollouts in straight for one in rollouts} == {None, 0, 1}
    assert len(engine.asked) - most_in_flight <= len(undisturbed.asked)


def test_a_stop_text_ends_a_turn_also_across_parts(tmp_path: Path) -> None:
    num_across = 0
    for _, rollouts in _in_rounds(tmp_path, FakeEngine(), environments=[{"id": TWO_TURNS}], sampling=STOPPING):
        for rollout in rollouts:
            assert rollout.sampling.stop == tuple(STOPPING["stop"])
            turns = [ids for sampled, ids in rollout.stretches() if sampled]
            texts = ["".join(chr(token + 92) for token in turn) for turn in turns]
            for text in texts:
                places = [place for place in range(len(text)) if text[place : place + 2] in STOPPING["stop"]]
                assert places == [len(text) - 2] or (not places and (text[-1] == END or len(text) == 24))
            num_across += texts[0][-2:] in STOPPING["stop"] and len(texts[0]) % 4 == 1
            assert rollout.truncated == any(len(text) == 24 and text[-2:] not in STOPPING["stop"] for text in texts)
    assert num_across > 2


def test_a_run_that_resumes_from_a_checkpoint_makes_the_same_batches(tmp_path: Path) -> None:
    straight = _in_rounds(tmp_path / "straight", FakeEngine(), max_steps=8)
    assert resumed_of(tmp_path / "resumed", FakeEngine(), at=4, stopped=4, **ROUNDS) == straight


def _faulty(directory: Path, faults: dict[str, str], **settings: Any) -> list[tuple[list[Rollout], list[Any]]]:
    return [(batch.rollouts, batch.dropped) for batch in faulty_run(directory, faults, schedule=ROUNDS, **settings)]


@pytest.mark.launch
def test_workers_and_their_deaths_change_nothing(tmp_path: Path) -> None:
    straight = _faulty(tmp_path / "straight", {})
    halfway = {"2": "halfway bereft once"}
    assert _faulty(tmp_path / "here", halfway) == straight
    faults = halfway | {"1": "killed once", "3": "halfway memory once", "4": "exits once", "6": "detached once"}
    for on_error in ("stop", "drop"):
        assert _faulty(tmp_path / on_error, faults | {"9": "killed once"}, workers=2, on_error=on_error) == straight


@pytest.mark.launch
def test_a_group_that_has_ended_its_worker_is_not_played_again_by_a_resumed_run(tmp_path: Path) -> None:
    section = {"id": "tests.runs.environments:Crashing", "workers": 4, "on_error": "drop"}
    common: dict[str, Any] = {"async_level": 3, "problems_per_step": 2, "environments": [section]}
    straight = _in_rounds(tmp_path / "straight", FakeEngine(), **common)
    assert [one.reason for one in journal.read_batch(RunDir(tmp_path / "straight"), 4).dropped] == ["crash"]
    resumed: dict[str, Any] = {"at": 3, "stopped": 3, "max_steps": 6, **ROUNDS, **common}
    assert resumed_of(tmp_path / "resumed", FakeEngine(), **resumed) == straight
    for step in range(1, 7):
        states = [(run_dir / f"rollouts/step_{step}/orchestrator.json").read_bytes() for run_dir in tmp_path.iterdir()]
        assert states[0] == states[1]


@pytest.mark.launch
def test_no_group_is_blamed_for_another_that_lacks_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_players, "MOST_KILLED", 1)
    args = {"args": {"lacks_memory": True}, "workers": 1, "on_error": "drop"}
    section = {"id": "tests.runs.environments:Crashing", **args}
    _in_rounds(tmp_path, FakeEngine(), max_steps=1, environments=[section], problems_per_step=2)
    assert journal.read_batch(RunDir(tmp_path), 1).dropped == []


def test_a_group_that_fails_is_dropped_or_ends_the_run(tmp_path: Path) -> None:
    made = _faulty(tmp_path / "dropped", {"1": "raises", "5": "raises"}, on_error="drop")
    assert [one.task_id for _, dropped in made for one in dropped] == [1, 5]
    assert len({rollout.task_id for rollouts, _ in made for rollout in rollouts}) == 4 * 3 - 2
    with pytest.raises(EnvironmentFailure, match=r"failed on task 5 .*: score\(\) raised KeyError"):
        _faulty(tmp_path / "stopped", {"5": "raises"})


def test_groups_that_fail_at_once_do_not_fill_a_batch_before_older_groups(tmp_path: Path) -> None:
    made = _in_rounds(tmp_path, FakeEngine(), environments=[{"id": f"{__name__}:FailsAtOnce", "on_error": "drop"}])
    assert {rollout.task_id for rollout in made[0][1]} == {0}
    assert [one.task_id for step in (1, 2) for one in journal.read_batch(RunDir(tmp_path), step).dropped] == [1, 2, 3]


def test_what_has_no_place_in_rounds_is_refused(tmp_path: Path) -> None:
    for changes, said in (
        ({"schedule": "strict"}, "round_tokens is for schedule = 'rounds'"),
        ({"dynamic_sampling": {}}, "and dynamic_sampling draws more"),
        ({"teacher": {"model": "a", "urls": ["http://127.0.0.1:1"]}}, "for answers of the policy alone"),
    ):
        with pytest.raises(ValueError, match=said):
            OrchestratorConfig.model_validate({"environments": [{"id": "a"}], **ROUNDS, **changes})
    with pytest.raises(ConfigError, match="Set it to 2 or more"):
        _in_rounds(tmp_path / "behind", FakeEngine(), async_level=1)
    with pytest.raises(ConfigError, match="samples after run\\(\\) has ended .*, which 'rounds' does not support"):
        _in_rounds(tmp_path, FakeEngine(), environments=[{"id": f"{__name__}:AsksInScore"}])


def test_open_groups_are_not_left_behind(tmp_path: Path) -> None:
    engine = FakeEngine()
    _in_rounds(tmp_path, engine, max_steps=3)
    orchestrator_fakes.commit_checkpoint(RunDir(tmp_path), 3)
    for changes, said in (
        ({"schedule": "strict", "round_tokens": None}, r"\d groups are open after batch 3, which was made in rounds"),
        ({"group_size": 2}, "was drawn in rounds for a group of 4, which the settings have no more"),
        ({"environments": [{"id": "reverse_text", "name": "other"}]}, "environment 'reverse_text' is open"),
    ):
        with serving(engine), pytest.raises(ConfigError, match=said):
            run(make_config(tmp_path, engine, ckpt={"resume_step": 3}, **(ROUNDS | changes)), start=3)
