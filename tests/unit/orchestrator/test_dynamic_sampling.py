"""Which groups go into a batch; and whole runs that drop them: without signal, by failures, by deadlines."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import RlConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.rl import hand_down_shared
from holdfast.errors import EnvironmentFailure
from holdfast.orchestrator.batch_maker import select
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.episodes import Outcome
from holdfast.orchestrator.state import read_state
from holdfast.protocol.rollouts import Batch, Dropped, Rewards, Rollout, Signal, StepRewards, TokenIds, has_signal
from holdfast.run import journal
from holdfast.run.journal import Accepted, Counts
from holdfast.run.run_dir import RunDir
from holdfast.trainer.rl.accounting import check_tasks
from tests.builders.sampled_rollouts import sampled_rollout
from tests.servers.orchestrator_fakes import FakeEngine, make_config, read_rollouts, run, run_until, serving

STEPS = 4


class Signals(Environment):
    """Two of three tasks give all their rollouts the same reward."""

    too_long = -1

    def make_task(self, seed: TaskSeed) -> Task:
        text = f"task {seed.index} " * (20 if seed.index == self.too_long else 1)
        return Task(prompt=[Message("user", text)], answer=f"{seed.index}")

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        teaches = int(task.answer) % 3 == 2
        return [Score(float(teaches and place == 0)) for place in range(len(sessions))]


class Never(Signals):
    """No task has a signal."""

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(0.5) for _ in sessions]


class Fails(Signals):
    """Task 1 makes one of its sessions fail, task 4 has a prompt that is too long."""

    too_long = 4

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        if task.answer == "1" and len(session.token_ids) % 2 == 0:
            raise ValueError("the moon is too bright")


class Hangs(Signals):
    """No session ever ends."""

    async def run(self, session: Session, task: Task) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def configure(output_dir: Path, engine: FakeEngine, kind: type[Environment], **changes: Any) -> OrchestratorConfig:
    values: dict[str, Any] = {"max_steps": STEPS, "environments": [{"id": f"{__name__}:{kind.__name__}", "name": "a"}]}
    return make_config(output_dir, engine, **(values | changes))


def checked_batches(run_dir: RunDir) -> list[Batch]:
    """Every batch, after the ledger has checked it against the states around it."""
    batches = []
    before = Accepted()
    for step in run_dir.published_batches():
        batch = journal.read_batch(run_dir, step)
        after = journal.read_accepted(run_dir.batch(step) / journal.STATE_NAME, step=step)
        check_tasks(batch, before=before, after=after)
        before = after
        batches.append(batch)
    return batches


def made(directory: Path, engine: FakeEngine, kind: type[Environment], **changes: Any) -> list[Batch]:
    """Return the batches of a whole run, checked by the ledger."""
    with serving(engine):
        run(configure(directory, engine, kind, **changes))
    return checked_batches(RunDir(directory))


def totals(run_dir: RunDir) -> Accepted:
    return journal.read_accepted(run_dir.batch(STEPS) / journal.STATE_NAME, step=STEPS)


def tasks_of(batch: Batch) -> list[int]:
    return list(dict.fromkeys(rollout.task_id for rollout in batch.rollouts))


def test_groups_without_signal_are_replaced_in_rounds_of_what_is_missing(tmp_path: Path, engine: FakeEngine) -> None:
    batches = made(tmp_path, engine, Signals, dynamic_sampling={})
    # Of tasks 0, 1, 2 the last has a signal; then 3, 4 (none), 5, 6 (5 has), 7, and 8, which ends the batch.
    assert tasks_of(batches[0]) == [2, 5, 8] and [one.task_id for one in batches[0].dropped] == [0, 1, 3, 4, 6, 7]
    assert [tasks_of(batch) for batch in batches[1:]] == [[11, 14, 17], [20, 23, 26], [29, 32, 35]]
    assert all(one.reason == "zero_signal" and one.rollouts == 4 for batch in batches for one in batch.dropped)
    assert len(engine.requests) == 9 * STEPS
    accepted = totals(RunDir(tmp_path))
    assert accepted.problems == 36 and accepted.dropped["zero_signal"].problems == 24
    assert accepted.batched.rollouts == sum(len(batch.rollouts) for batch in batches) == 12 * STEPS
    state = read_state(RunDir(tmp_path).batch(STEPS) / journal.STATE_NAME, step=STEPS)
    assert state.sampled_tokens == sum(one.loss_mask.num_sampled for batch in batches for one in batch.rollouts)
    metrics = batches[0].metrics
    names = ("groups/drawn", "groups/dropped/zero_signal", "groups/dropped/timeout")
    assert [metrics[name] for name in names] == [9, 6, 0] and metrics["groups/zero_variance"] == pytest.approx(6 / 9)
    # Rewards are those of everything that was sampled: 3 of 36 rollouts.
    assert metrics["reward/mean"] == pytest.approx(3 / 36)


def test_at_the_limit_the_earliest_groups_without_signal_fill_the_batch(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    never = made(tmp_path / "never", engine, Never, dynamic_sampling={"max_problems_per_step": 5})
    assert [tasks_of(batch) for batch in never[:2]] == [[0, 1, 2], [5, 6, 7]]
    assert [[one.task_id for one in batch.dropped] for batch in never[:2]] == [[3, 4], [8, 9]]
    few = made(tmp_path / "few", engine, Signals, dynamic_sampling={"max_problems_per_step": 6})
    assert [tasks_of(batch) for batch in few[:2]] == [[0, 2, 5], [6, 8, 11]]
    assert "batch 1: 3 of its 3 groups have no signal after 5 problems" in caplog.text


@pytest.mark.parametrize("at_request", [2, 5, 9, 14])
def test_a_kill_between_rounds_changes_and_repeats_nothing(tmp_path: Path, engine: FakeEngine, at_request: int) -> None:
    straight, killed = RunDir(tmp_path / "straight"), RunDir(tmp_path / "killed")
    expected = made(straight.path, engine, Signals, dynamic_sampling={})
    engine.requests.clear()
    with serving(engine):
        config = configure(killed.path, engine, Signals, dynamic_sampling={})
        run_until(at_request, engine, config)
        asked = len(engine.requests)
        run(config)
    assert read_rollouts(straight, range(1, STEPS + 1)) == read_rollouts(killed, range(1, STEPS + 1))
    assert [batch.dropped for batch in checked_batches(killed)] == [batch.dropped for batch in expected]
    assert totals(straight) == totals(killed)
    # What was in flight at the kill is asked for again, nothing else.
    assert len(engine.requests) <= 9 * STEPS + 3 and asked < len(engine.requests)


def test_failed_groups_are_dropped_with_their_reason_and_counted_exactly(tmp_path: Path, engine: FakeEngine) -> None:
    section = {"id": f"{__name__}:Fails", "name": "a", "on_error": "drop"}
    batches, again = (made(tmp_path / name, engine, Fails, environments=[section], seq_len=64) for name in "ab")
    assert [tasks_of(batch) for batch in batches] == [[0, 2], [3, 5], [6, 7, 8], [9, 10, 11]]
    (failed,), (too_long,) = batches[0].dropped, batches[1].dropped
    assert (failed.task_id, failed.reason, failed.rollouts) == (1, "environment_error", 4)
    seed = TaskSeed(run_seed=0, environment="a", index=1).number
    assert f"environment 'a' failed on task 1 (seed {seed}): run() raised ValueError: the moon" in failed.detail
    assert (too_long.task_id, too_long.reason, too_long.rollouts, too_long.tokens) == (4, "prompt_too_long", 0, 0)
    assert "allowed are 1 to 63" in too_long.detail
    # The other sessions of a failed group are played to their end, so its tokens do not depend on timing.
    assert again[0].dropped == [failed]
    counts = {"environment_error": Counts(1, 4, failed.tokens), "prompt_too_long": Counts(1, 0, 0)}
    assert totals(RunDir(tmp_path / "a")).dropped == counts
    assert batches[0].metrics["groups/dropped/environment_error"] == 1.0


def hanging(**settings: Any) -> list[dict[str, Any]]:
    return [{"id": "reverse_text"}, {"id": f"{__name__}:Hangs", "name": "slow", "timeout_s": 0.02, **settings}]


def test_a_deadline_drops_the_group_and_the_run_goes_on(tmp_path: Path, engine: FakeEngine) -> None:
    batches = made(tmp_path, engine, Hangs, environments=hanging(on_error="drop"), max_steps=STEPS)
    dropped = [one for batch in batches for one in batch.dropped]
    assert [(one.environment, one.task_id, one.reason) for one in dropped] == [("slow", n, "timeout") for n in range(6)]
    assert "run() took longer than 0.02 s (timeout_s)" in dropped[0].detail
    assert all({rollout.environment for rollout in batch.rollouts} == {"reverse_text"} for batch in batches)


def test_a_deadline_or_a_batch_with_nothing_left_ends_the_run(tmp_path: Path, engine: FakeEngine) -> None:
    with serving(engine), pytest.raises(EnvironmentFailure, match=r"'slow' failed on task 0.*longer than 0\.02 s"):
        run(configure(tmp_path, engine, Hangs, environments=hanging()))
    settings = hanging(on_error="drop")[1:]
    message = r"batch 1: all 3 groups were dropped \(3 timeout\).*longer than 0\.02 s"
    with serving(engine), pytest.raises(EnvironmentFailure, match=message):
        run(configure(tmp_path, engine, Hangs, environments=settings))


def test_a_limit_below_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_problems_per_step = 2 is less than problems_per_step = 3"):
        make_config(tmp_path, client={}, dynamic_sampling={"max_problems_per_step": 2})


def group(task: int, rewards: Sequence[float]) -> list[Rollout]:
    return [sampled_rollout(reward, task_id=task) for reward in rewards]


def failed(task: int) -> Dropped:
    return Dropped(environment="a", task_id=task, reason="environment_error", rollouts=2, tokens=5, detail="why")


def zero_signal(task: int) -> Dropped:
    return Dropped(environment="a", task_id=task, reason="zero_signal", rollouts=2, tokens=6)


@pytest.mark.parametrize("signal", ["sum", "parts"])
def test_a_group_has_signal_if_its_rewards_differ(signal: Signal) -> None:
    assert has_signal(group(0, [1.0, 0.0]), signal) and has_signal(group(0, [0.5, 0.5, 0.5 + 1e-12]), signal)
    assert not has_signal(group(0, [0.3, 0.3, 0.3]), signal) and not has_signal(failed(0), signal)
    # Rewards of the wholes, and those of two turns each: equal sums say nothing where the sum is what is raised.
    for rewards, turns, by_sum, by_parts in (
        ([1.0, 1.0], [[0.5, 0.5], [0.5, 0.5]], False, False),
        ([1.0, 1.0], [[0.5, 0.5], [0.5, 0.25]], True, True),
        ([1.0, 1.0], [[1.0, 0.0], [0.0, 1.0]], False, True),
        ([2.0, 1.0], [[0.0, 0.0], [0.5, 0.5]], False, True),
    ):
        with_steps = group(0, rewards)
        for rollout, own in zip(with_steps, turns, strict=True):
            rollout.step_rewards = StepRewards(TokenIds([1, 2]), Rewards(own))
        assert has_signal(with_steps, signal) == (by_sum if signal == "sum" else by_parts)


def test_a_run_asks_for_the_signal_that_its_advantages_learn_from() -> None:
    def signal(**trainer: Any) -> str:
        orchestrator = {"dynamic_sampling": {}, "environments": [{"id": "reverse_text"}]}
        config = RlConfig.model_validate({"trainer": trainer, "orchestrator": orchestrator})
        return hand_down_shared(config).orchestrator.signal

    expected = {"dr_grpo": "sum", "grpo_process": "parts", "reinforce_pp": "parts", "own:advantage": "parts"}
    assert {name: signal(advantage=name) for name in expected} == expected
    assert signal(environments={"reverse_text": {"advantage": "grpo_process"}}) == "parts"


def test_groups_with_signal_come_first_and_the_earliest_others_fill_the_batch() -> None:
    equal, unequal = [1.0, 1.0], [1.0, 0.0]
    earlier = [group(0, equal), group(1, unequal), failed(2)]
    outcomes: list[Outcome] = [*earlier, group(3, equal), group(4, equal), group(5, unequal)]

    def chosen(num_groups: int) -> tuple[list[int], list[int], list[Dropped]]:
        found = select(outcomes, num_groups=num_groups, signal="sum")
        held, unused = ([one[0].task_id for one in groups] for groups in (found.groups, found.unused))
        return held, unused, found.dropped

    assert chosen(2) == ([1, 5], [0, 3, 4], [zero_signal(0), failed(2), zero_signal(3), zero_signal(4)])
    assert chosen(3) == ([0, 1, 5], [3, 4], [failed(2), zero_signal(3), zero_signal(4)])
    assert chosen(6) == ([0, 1, 3, 4, 5], [], [failed(2)])
