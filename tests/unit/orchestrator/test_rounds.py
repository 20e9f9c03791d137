"""Batches that are made in rounds: they depend on seeds and tokens alone, whatever is slow or killed."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.state import read_state
from holdfast.protocol.rollouts import Rollout
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from holdfast.trainer.rl.accounting import check_tasks
from tests.servers.orchestrator_fakes import (
    FakeEngine,
    commit_checkpoint,
    make_config,
    publish_weights,
    read_rollouts,
    rollouts_of,
    run,
    run_until,
    serving,
)

ROUNDS: dict[str, Any] = {"schedule": "rounds", "async_level": 2, "round_tokens": 4}


def _in_rounds(directory: Path, *engines: FakeEngine, **changes: Any) -> list[tuple[int, list[Rollout]]]:
    return rollouts_of(directory, *engines, **(ROUNDS | changes))


def test_without_staleness_the_batches_are_those_of_the_strict_schedule(tmp_path: Path) -> None:
    common = {"async_level": 0, "environments": [{"id": "tests.runs.environments:TwoTurns"}, {"id": "reverse_text"}]}
    strict = rollouts_of(tmp_path / "strict", FakeEngine(), schedule="strict", **common)
    assert rollouts_of(tmp_path / "rounds", FakeEngine(), schedule="rounds", **common) == strict


def test_groups_of_several_batches_go_on_side_by_side(tmp_path: Path) -> None:
    made = _in_rounds(tmp_path, FakeEngine(), max_steps=8)
    versions = [[{span.version for span in one.versions} for one in rollouts] for _, rollouts in made]
    assert any(len(found) > 1 for own in versions for found in own), "no answer saw new weights"
    for step, own in enumerate(versions, start=1):
        assert all(max(0, step - 3) <= min(found) and max(found) <= max(0, step - 2) for found in own), (step, own)
        batch = journal.read_batch(RunDir(tmp_path), step)
        of_batch = {version for found in own for version in found}
        assert set(batch.older_digests) == of_batch - {batch.policy_version}
    everything = [(one.task_id, one.sample_index) for _, rollouts in made for one in rollouts]
    assert len(set(everything)) == len(everything) == 8 * 3 * 4


def test_speed_engines_and_slots_decide_nothing(tmp_path: Path) -> None:
    straight = _in_rounds(tmp_path / "straight", FakeEngine())
    slow = [FakeEngine(), FakeEngine()]
    chance = random.Random(7)
    for engine in slow:
        engine.on_generate = lambda _: time.sleep(chance.random() / 100)
    assert _in_rounds(tmp_path / "slow", *slow) == straight
    few = {"client": {"max_concurrency": 3}}
    assert _in_rounds(tmp_path / "few", FakeEngine(), **few) == _in_rounds(tmp_path / "again", FakeEngine(), **few)


@pytest.mark.parametrize("killed_at", [3, 17, 40, 71])
def test_a_killed_orchestrator_samples_nothing_twice_and_ends_with_the_same_batches(
    tmp_path: Path, killed_at: int
) -> None:
    common = ROUNDS | {"environments": [{"id": "tests.runs.environments:TwoTurns"}]}
    undisturbed = FakeEngine()
    straight = rollouts_of(tmp_path / "straight", undisturbed, **common)
    engine = FakeEngine()
    with serving(engine):
        config = make_config(tmp_path / "killed", engine, max_steps=6, **common)
        publish_weights(RunDir(config.output_dir), 0, b"start")
        run_until(killed_at, engine, config)
        run(config)
    assert read_rollouts(RunDir(tmp_path / "killed"), range(1, 7)) == straight
    most_in_flight = 3 * 3 * 4
    assert _asked(engine) - most_in_flight <= _asked(undisturbed)


def _asked(engine: FakeEngine) -> int:
    return sum(len(request["seeds"]) for request in engine.requests)


def test_a_run_that_resumes_from_a_checkpoint_makes_the_same_batches(tmp_path: Path) -> None:
    straight = _in_rounds(tmp_path / "straight", FakeEngine(), max_steps=8)
    engine, resumed = FakeEngine(), RunDir(tmp_path / "resumed")
    _in_rounds(resumed.path, engine, max_steps=4)
    commit_checkpoint(resumed, 4)
    with serving(engine):
        run(make_config(resumed.path, engine, ckpt={"resume_step": 4}, **ROUNDS), start=4)
    assert read_rollouts(resumed, range(1, 9)) == straight


def test_the_ledger_closes_with_what_is_open(tmp_path: Path) -> None:
    _in_rounds(tmp_path, FakeEngine())
    run_dir, before = RunDir(tmp_path), journal.Accepted()
    for step in range(1, 7):
        path = run_dir.batch(step) / journal.STATE_NAME
        after = journal.read_accepted(path, step=step)
        check_tasks(journal.read_batch(run_dir, step), before=before, after=after)
        before, state = after, read_state(path, step=step)
        assert state.rounds is not None
        assert [entry.task_id for entry in state.rounds.open] == list(after.open("reverse_text"))
        assert len(state.rounds.open) >= 3
