"""Advantages against values computed by hand."""

from __future__ import annotations

import math

import pytest

from orchestrator.advantage import dr_grpo, grpo, sample_std


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
@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
def test_equal_rewards_give_exactly_zero(advantage, reward: float) -> None:  # type: ignore[no-untyped-def]
    assert advantage([reward] * 7) == [0.0] * 7
    assert advantage([reward]) == [0.0]
