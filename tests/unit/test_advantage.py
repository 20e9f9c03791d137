"""Advantages against values computed by hand."""

from __future__ import annotations

import inspect
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.policy.advantage import (
    choose_advantage,
    dr_grpo,
    grpo,
    max_rl,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    sample_std,
)
from trainer.policy.rollouts import ADVANTAGE, assign_advantages, group_rollouts, to_samples
from triad.config.rl_trainer import ADVANTAGES, TOKEN_ADVANTAGES, TrainerConfig
from triad.errors import ConfigError, TrainingError
from triad.messages import Rollout


def test_dr_grpo_is_reward_minus_mean() -> None:
    assert dr_grpo([1.0, 2.0, 3.0, 6.0]) == [-2.0, -1.0, 0.0, 3.0]


def test_grpo_divides_by_the_sample_std_plus_epsilon() -> None:
    # mean 0.5; sum of squares 4 * 0.25 = 1; sample std sqrt(1 / 3) = 0.5773503
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert grpo([1.0, 0.0, 0.0, 1.0]) == pytest.approx([expected, -expected, -expected, expected], rel=1e-12)
    assert expected == pytest.approx(0.8660239, abs=1e-6)
    # mean 3; squares 4 + 1 + 0 + 9 = 14; sample std sqrt(14 / 3) = 2.1602469
    assert grpo([1.0, 2.0, 3.0, 6.0]) == pytest.approx([-0.9258197, -0.4629098, 0.0, 1.3887296], abs=1e-6)


def test_sample_std_differs_from_the_population_std() -> None:
    assert sample_std([1.0, 2.0, 3.0, 4.0]) == pytest.approx(1.2909944487)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7])
@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo])
def test_equal_rewards_give_exactly_zero(advantage, reward: float) -> None:  # type: ignore[no-untyped-def]
    assert advantage([reward] * 7) == [0.0] * 7
    assert advantage([reward]) == [0.0]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # Means of the others: (2 + 3 + 6) / 3, (1 + 3 + 6) / 3, (1 + 2 + 6) / 3, (1 + 2 + 3) / 3.
    assert rloo([1.0, 2.0, 3.0, 6.0]) == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0])


def test_max_rl_divides_by_the_mean() -> None:
    assert max_rl([1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert max_rl([1.0, 1.0, 0.0, 0.0]) == [1.0, 1.0, -1.0, -1.0]
    assert max_rl([0.0, 0.0]) == max_rl([0.1] * 3)[:2] == [0.0, 0.0]
    with pytest.raises(TrainingError, match="at least 0, got -0.5"):
        max_rl([1.0, -0.5])


def test_reinforce_pp_whitens_over_the_batch() -> None:
    # All four: mean 3, sample std sqrt(14 / 3). Less the group means 1.5 and 4.5: -.5, .5, -1.5, 1.5, std sqrt(5 / 3).
    std, rest = math.sqrt(14 / 3) + 1e-6, math.sqrt(5 / 3) + 1e-6
    got = reinforce_pp([[1.0, 2.0], [3.0, 6.0]])
    assert [pytest.approx(group, rel=1e-12) for group in got] == [[-2 / std, -1 / std], [0.0, 3 / std]]
    got = reinforce_pp_baseline([[1.0, 2.0], [3.0, 6.0]])
    assert [pytest.approx(group, rel=1e-12) for group in got] == [[-0.5 / rest, 0.5 / rest], [-1.5 / rest, 1.5 / rest]]


def slow(name: str, rewards: list[list[float]]) -> list[list[float]]:
    everything = [reward for group in rewards for reward in group]
    means = [statistics.fmean(group) for group in rewards]
    centred = [reward - mean for group, mean in zip(rewards, means, strict=True) for reward in group]
    result = []
    for group, mean in zip(rewards, means, strict=True):
        result.append([])
        for index, reward in enumerate(group):
            result[-1].append(
                {
                    "grpo": (reward - mean) / (statistics.stdev(group) + 1e-6),
                    "dr_grpo": reward - mean,
                    "rloo": reward - statistics.fmean(group[:index] + group[index + 1 :]),
                    "max_rl": (reward - mean) / mean,
                    "reinforce_pp": (reward - statistics.fmean(everything)) / (statistics.stdev(everything) + 1e-6),
                    "reinforce_pp_baseline": (reward - mean) / (statistics.stdev(centred) + 1e-6),
                }[name]
            )
    return result


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_is_the_slow_one_and_follows_the_reward(name: str) -> None:
    generator = random.Random(0)
    for _ in range(20):
        rewards = [[generator.random() for _ in range(5)] for _ in range(3)]
        got = choose_advantage(name)(rewards)
        for group, expected, rewards_G in zip(got, slow(name, rewards), rewards, strict=True):
            assert group == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert group.index(max(group)) == rewards_G.index(max(rewards_G))


def rollout(task_id: int, reward: float) -> Rollout:
    return Rollout(
        environment="e", task_id=task_id, sample_index=0, token_ids=[1, 2], loss_mask=[False, True],
        logprobs=[0.0, 0.0], versions=[], reward=reward,
    )  # fmt: skip


def test_advantages_reach_every_token_of_their_rollouts() -> None:
    rollouts = [rollout(0, 1.0), rollout(0, 3.0), rollout(1, 5.0), rollout(1, 4.0)]
    samples = to_samples(rollouts, trained_version=0)
    rewards_PG = [[one.reward for one in group] for group in group_rollouts(rollouts)]
    assert rewards_PG == [[1.0, 3.0], [5.0, 4.0]]
    assign_advantages(samples, choose_advantage("dr_grpo")(rewards_PG))
    given = [sample.per_token[ADVANTAGE].tolist() for sample in samples]
    assert given == [[-1.0] * 2, [1.0] * 2, [0.5] * 2, [-0.5] * 2]


# The example of docs/extending.md.
def best_of_group(rewards_PG: list[list[float]]) -> list[list[float]]:
    """1 for the best rollout of each problem, 0 for the others."""
    return [[float(reward == max(rewards_G)) for reward in rewards_G] for rewards_G in rewards_PG]


def too_few(rewards_PG: list[list[float]]) -> list[list[float]]:
    return [[0.0] for _ in rewards_PG]


def not_finite(rewards_PG: list[list[float]]) -> list[list[float]]:
    return [[math.nan] * len(rewards_G) for rewards_G in rewards_PG]


def test_an_advantage_of_the_user() -> None:
    config = TrainerConfig(advantage=f"{__name__}:best_of_group")
    assert choose_advantage(config.advantage)([[1.0, 3.0], [5.0, 4.0]]) == [[0.0, 1.0], [1.0, 0.0]]


def fails(rewards_PG: list[list[float]]) -> list[list[float]]:
    return [[reward / 0 for reward in rewards_G] for rewards_G in rewards_PG]


def test_a_wrong_advantage_of_the_user_is_named() -> None:
    with pytest.raises(ConfigError, match=r"advantage = '.*:best'.*has no function 'best'"):
        choose_advantage(f"{__name__}:best")
    for function, message in (
        ("too_few", r"groups of \[1\] numbers for groups of \[2\]"),
        ("not_finite", "not finite"),
        ("fails", "failed: ZeroDivisionError: "),
    ):
        with pytest.raises(TrainingError, match=f"{function}.*{message}"):
            choose_advantage(f"{__name__}:{function}")([[1.0, 2.0]])


def test_an_unknown_advantage_is_refused_with_what_is_allowed() -> None:
    settings: dict[str, Any] = {"advantage": "rlo"}
    with pytest.raises(ValidationError, match="Did you mean 'rloo'.*reinforce_pp.*module:function"):
        TrainerConfig.model_validate(settings)


def test_the_documentation_shows_the_example_and_every_name() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert inspect.getsource(best_of_group) in (docs / "extending.md").read_text()
    page = (docs / "advantages.md").read_text()
    assert all(f"\n| `{name}` |" in page for name in (*ADVANTAGES, *TOKEN_ADVANTAGES))
