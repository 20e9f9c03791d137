"""Which groups go into a batch, and how those that do not are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.config import RlConfig
from holdfast.config.rl import hand_down_shared
from holdfast.orchestrator.batch_maker import count, select
from holdfast.orchestrator.episodes import Outcome
from holdfast.orchestrator.state import OrchestratorState
from holdfast.protocol.rollouts import (
    Dropped,
    Logprobs,
    LossMask,
    Rewards,
    Rollout,
    Signal,
    StepRewards,
    TokenIds,
    has_signal,
)
from holdfast.run.journal import Counts


def group(task: int, rewards: Sequence[float]) -> list[Rollout]:
    return [
        Rollout(
            environment="a", task_id=task, sample_index=sample, token_ids=TokenIds([1, 2, 3]),
            loss_mask=LossMask([0, 1, 1]), logprobs=Logprobs([0.0] * 3), versions=[], reward=reward,
        )
        for sample, reward in enumerate(rewards)
    ]  # fmt: skip


def failed(task: int) -> Dropped:
    return Dropped(environment="a", task_id=task, reason="environment_error", rollouts=2, tokens=5, detail="why")


def zero_signal(task: int) -> Dropped:
    return Dropped(environment="a", task_id=task, reason="zero_signal", rollouts=2, tokens=6)


@pytest.mark.parametrize("signal", ["sum", "parts"])
def test_a_group_has_signal_if_its_rewards_differ(signal: Signal) -> None:
    assert has_signal(group(0, [1.0, 0.0]), signal)
    assert has_signal(group(0, [0.5, 0.5, 0.5 + 1e-12]), signal)
    assert not has_signal(group(0, [0.3, 0.3, 0.3]), signal)
    assert not has_signal(failed(0), signal)
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
        environments = [{"id": "reverse_text"}]
        config = RlConfig.model_validate(
            {"trainer": trainer, "orchestrator": {"dynamic_sampling": {}, "environments": environments}}
        )
        return hand_down_shared(config).orchestrator.signal

    expected = {"dr_grpo": "sum", "grpo_process": "parts", "reinforce_pp": "parts", "own:advantage": "parts"}
    assert {name: signal(advantage=name) for name in expected} == expected
    assert signal(environments={"reverse_text": {"advantage": "grpo_process"}}) == "parts"


def test_groups_with_signal_come_first_and_the_earliest_others_fill_the_batch() -> None:
    equal, unequal = [1.0, 1.0], [1.0, 0.0]
    outcomes: list[Outcome] = [
        group(0, equal), group(1, unequal), failed(2), group(3, equal), group(4, equal), group(5, unequal),
    ]  # fmt: skip

    def chosen(num_groups: int) -> tuple[list[int], list[int], list[Dropped]]:
        found = select(outcomes, num_groups=num_groups, signal="sum")
        held, unused = ([one[0].task_id for one in groups] for groups in (found.groups, found.unused))
        return held, unused, found.dropped

    assert chosen(2) == ([1, 5], [0, 3, 4], [zero_signal(0), failed(2), zero_signal(3), zero_signal(4)])
    assert chosen(3) == ([0, 1, 5], [3, 4], [failed(2), zero_signal(3), zero_signal(4)])
    assert chosen(6) == ([0, 1, 3, 4, 5], [], [failed(2)])


def test_counters_hold_what_was_drawn_and_what_of_that_was_dropped() -> None:
    state = OrchestratorState(step=3, problems=10, rollouts=20, tokens=60, sampled_tokens=40)
    state.dropped["zero_signal"] = Counts(1, 2, 7)
    count(state, 4, select([group(0, [1.0, 1.0]), group(1, [0.0, 1.0]), failed(2)], num_groups=1, signal="sum"))
    assert state.step == 4
    assert (state.problems, state.rollouts, state.tokens, state.sampled_tokens) == (13, 26, 77, 44)
    assert state.dropped == {"zero_signal": Counts(2, 4, 13), "environment_error": Counts(1, 2, 5)}
