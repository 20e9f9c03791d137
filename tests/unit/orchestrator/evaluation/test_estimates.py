"""Estimates and intervals against values from elsewhere, and against what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from holdfast.orchestrator.evaluation.statistics import (
    Estimate,
    mean_over_tasks,
    paired_difference,
    pass_at_k,
    powers_up_to,
    wilson,
)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    solved = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(solved, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert [powers_up_to(number) for number in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


def test_wilson_is_what_statistics_packages_give() -> None:
    """R: prop.test(x, n, correct = FALSE); statsmodels: proportion_confint(x, n, method = "wilson")."""
    assert wilson(8, 10, confidence=0.95) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 20, confidence=0.95) == (0.0, pytest.approx(0.1611252, abs=1e-6))
    assert wilson(20, 20, confidence=0.95) == (pytest.approx(0.8388748, abs=1e-6), 1.0)


def test_shares_get_wilsons_interval_and_means_that_of_the_bootstrap() -> None:
    assert mean_over_tasks([1.0, 0.0, 1.0, 1.0], confidence=0.95) == Estimate(0.75, *wilson(3, 4, confidence=0.95))
    values = np.random.default_rng(1).uniform(size=400).tolist()
    found = mean_over_tasks(values, confidence=0.95)
    half = 1.96 * np.std(values) / np.sqrt(len(values))  # of many tasks, the normal interval
    assert found.value == pytest.approx(np.mean(values))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.1 * half)
    assert mean_over_tasks(values, confidence=0.95) == found, "the same rollouts give the same interval"
    narrow = mean_over_tasks(values, confidence=0.8)
    assert found.low is not None and narrow.low is not None and narrow.low > found.low
    assert mean_over_tasks([0.5], confidence=0.95) == Estimate(0.5, None, None), "one task says nothing about others"
    assert paired_difference([0.5], [0.75], confidence=0.95).difference == Estimate(0.25, None, None)


def test_the_paired_test_counts_all_signs_of_few_tasks() -> None:
    """Three tasks that all got better: 2 of 8 choices of signs are as far from 0."""
    found = paired_difference([0.0, 0.0, 0.5, 0.5], [1.0, 0.5, 0.75, 0.5], confidence=0.95)
    assert (found.p_value, found.num_higher, found.num_lower) == (0.25, 3, 0)
    assert found.difference.value == pytest.approx(1.75 / 4)
    assert paired_difference([0.5, 1.0], [0.5, 1.0], confidence=0.95).p_value == 1.0
    mixed = paired_difference([0.0, 1.0], [1.0, 0.0], confidence=0.95)
    assert (mixed.p_value, mixed.num_higher, mixed.num_lower) == (1.0, 1, 1)


def test_the_paired_test_of_many_tasks_finds_what_is_there_and_not_what_is_not() -> None:
    generator = np.random.default_rng(2)
    first = generator.uniform(size=300)
    better = paired_difference(first.tolist(), (first + generator.normal(0.05, 0.2, 300)).tolist(), confidence=0.95)
    assert better.p_value < 0.01 and better.difference.low is not None and better.difference.low > 0
    values = [
        paired_difference(first.tolist(), (first + generator.normal(0, 0.2, 300)).tolist(), confidence=0.95).p_value
        for _ in range(40)
    ]
    assert sum(value < 0.1 for value in values) <= 10, "of equal policies a tenth is expected"
