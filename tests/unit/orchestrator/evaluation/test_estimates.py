"""Estimates and intervals against values from elsewhere, and against what they promise."""

import itertools
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from holdfast.orchestrator.evaluation import statistics as evaluation_statistics
from holdfast.orchestrator.evaluation.results import EvaluatedRollout
from holdfast.orchestrator.evaluation.statistics import Estimate, mean_over_tasks, paired_difference, student_quantile


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    solved = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(solved, k))
        assert evaluation_statistics.pass_at_k(5, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert [evaluation_statistics.powers_up_to(number) for number in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


def test_a_number_of_the_environment_does_not_hide_an_estimate() -> None:
    rollout = EvaluatedRollout(environment="e", task=0, reward=0.5, solved=True, metrics={"pass@1": 9.0, "other": 2.0})
    identity = {"samples_per_task": 1, "environments": ["e"], "policy": {}}
    found = evaluation_statistics.summarize({("e", 0): [rollout]}, identity, confidence=0.95).metrics()
    assert found == {"eval/e/pass@1": 1.0, "eval/e/other": 2.0, "eval/e/avg@1": 0.5, "eval/e/truncated": 0.0}


def test_wilson_is_what_statistics_packages_give() -> None:
    """R: prop.test(x, n, correct = FALSE); statsmodels: proportion_confint(x, n, method = "wilson")."""
    for successes, trials, ends in (
        (8, 10, (0.4901625, 0.9433178)), (0, 20, (0.0, 0.1611252)), (20, 20, (0.8388748, 1.0))
    ):  # fmt: skip
        found = mean_over_tasks([1.0] * successes + [0.0] * (trials - successes), confidence=0.95)
        assert (found.low, found.high) == pytest.approx(ends, abs=1e-6)


def test_students_quantile_is_that_of_the_tables() -> None:
    for degrees, confidence, quantile in ((3, 0.95, 3.182), (10, 0.95, 2.228), (29, 0.99, 2.756), (999, 0.9, 1.646)):
        assert student_quantile(degrees, confidence=confidence) == pytest.approx(quantile, rel=2e-3)


def test_intervals_of_many_tasks_are_normal_and_of_one_there_are_none() -> None:
    values = np.random.default_rng(1).uniform(size=400).tolist()
    for scores in (values, [3 * value - 1 for value in values]):
        found = mean_over_tasks(scores, confidence=0.95)
        half = 1.96 * np.std(scores) / np.sqrt(len(scores))
        assert found.value == pytest.approx(np.mean(scores))
        assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.1 * half)
        narrow = mean_over_tasks(scores, confidence=0.8)
        assert found.low is not None and narrow.low is not None and narrow.low > found.low
    assert mean_over_tasks([0.5], confidence=0.95) == Estimate(0.5, None, None), "one task says nothing about others"
    assert paired_difference([0.5], [0.75], confidence=0.95).difference == Estimate(0.25, None, None)
    equal = mean_over_tasks([0.5] * 10, confidence=0.95)
    assert (equal.low, equal.high) == pytest.approx((0.2366, 0.7634), abs=1e-4), "as of 5 tasks of 10"
    assert mean_over_tasks([-1.0] * 30, confidence=0.95) == Estimate(-1.0, None, None), "a point would be too sure"
    nearly = mean_over_tasks([0.0, 1e-200, 0.0], confidence=0.95)
    assert nearly.low == nearly.high == nearly.value


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 1.0, 5.0], [-3.0, 2.0, 2.0, 2.5], [0.1, 0.5, 0.9]])
def test_the_transformed_t_of_hall_is_students_quantile_at_the_ends(values: list[float]) -> None:
    number, mean, std = len(values), statistics.fmean(values), statistics.stdev(values)
    skewness = statistics.fmean(((value - mean) / std) ** 3 for value in values)
    low, high = evaluation_statistics.without_skewness(values, confidence=0.9)
    for end, side in ((low, 1), (high, -1)):
        t = (mean - end) / std
        found = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / (6 * number)
        assert found == pytest.approx(side * student_quantile(number - 1, confidence=0.9) / number**0.5)


SCORES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "hard tasks": (lambda random, n: random.binomial(8, random.beta(0.3, 3, n)) / 8, 0.3 / 3.3),
    "harder tasks": (lambda random, n: random.binomial(8, random.beta(0.1, 2, n)) / 8, 0.1 / 2.1),
    "easy tasks": (lambda random, n: random.binomial(8, random.beta(3, 0.3, n)) / 8, 3 / 3.3),
    "equal tasks": (lambda random, n: random.binomial(4, 0.1, n) / 4, 0.1),
    "one sample": (lambda random, n: random.binomial(1, 0.1, n).astype(float), 0.1),
    "two kinds of tasks": (lambda random, n: random.binomial(8, random.beta(0.5, 0.5, n)) / 8, 0.5),
    "lopsided rewards": (lambda random, n: random.exponential(size=n), 1.0),
    "hard tasks, points": (lambda random, n: 10 * random.binomial(8, random.beta(0.2, 3, n)) / 8 - 5, 2 / 3.2 - 5),
    "hard tasks, 1 or -1": (lambda random, n: 2.0 * random.binomial(1, 0.05, n) - 1, -0.9),
    "rewards": (lambda random, n: random.normal(size=n), 0.0),
}


@pytest.mark.parametrize("name", SCORES)
def test_intervals_of_95_percent_hold_the_mean_of_30_tasks_in_92_or_more(name: str) -> None:
    """Of the percentile bootstrap 87 % do on hard tasks."""
    score, mean = SCORES[name]
    random = np.random.default_rng(0)
    found = [mean_over_tasks(score(random, 30).tolist(), confidence=0.95) for _ in range(1000)]
    held = np.mean([one.low <= mean <= one.high for one in found if one.low is not None and one.high is not None])
    assert held >= 0.92


def test_the_paired_test_counts_all_signs_of_few_tasks() -> None:
    """Three tasks that all got better: 2 of 8 choices of signs are as far from 0."""
    found = paired_difference([0.0, 0.0, 0.5, 0.5], [1.0, 0.5, 0.75, 0.5], confidence=0.95)
    assert (found.p_value, found.num_higher, found.num_lower) == (0.25, 3, 0)
    assert found.difference == Estimate(1.75 / 4, None, None), "of four tasks nothing is refused"
    assert paired_difference([0.5, 1.0], [0.5, 1.0], confidence=0.95).p_value == 1.0
    mixed = paired_difference([0.0, 1.0], [1.0, 0.0], confidence=0.95)
    assert (mixed.p_value, mixed.num_higher, mixed.num_lower) == (1.0, 1, 1)


def test_p_is_that_of_all_signs_and_the_interval_what_the_test_does_not_refuse() -> None:
    """Both worked out from the signs, for the differences and for the differences less any other mean."""
    differences = np.random.default_rng(3).normal(0.3, 0.5, 9).round(2)
    signs = np.array(list(itertools.product((-1, 1), repeat=9)))

    def p_of(mean: float) -> float:
        left = differences - mean
        return float((np.abs(signs @ left) >= abs(left.sum()) * (1 - 1e-9)).mean())

    found = paired_difference([0.0] * 9, differences.tolist(), confidence=0.9)
    low, high = found.difference.low, found.difference.high
    assert found.p_value == pytest.approx(p_of(0.0)) and low is not None and high is not None
    for inside, outside in ((low + 1e-6, low - 1e-6), (high - 1e-6, high + 1e-6)):
        assert p_of(inside) > 0.1 >= p_of(outside)


def test_interval_and_p_never_disagree() -> None:
    random, refused = np.random.default_rng(4), 0
    for case in range(200):
        number, confidence = int(random.integers(1, 60)), float(random.choice([0.8, 0.9, 0.95, 0.99]))
        second = random.binomial(4, random.beta(0.5, 1, number)) / 4
        first = random.binomial(4, random.beta(0.3, 1, number)) / 4 if case % 2 else second - random.choice([0, 1, 2])
        found = paired_difference(first.tolist(), second.tolist(), confidence=confidence)
        low, high = found.difference.low, found.difference.high
        leaves_out_0 = low is not None and high is not None and not low <= 0 <= high
        assert leaves_out_0 == (found.p_value <= 1 - confidence + 1e-9), (case, found)
        assert low is None or high is None or low <= found.difference.value <= high
        refused += leaves_out_0
    assert 50 < refused < 150


def test_equal_policies_differ_as_often_as_p_says_and_intervals_hold_the_difference() -> None:
    random = np.random.default_rng(2)

    def solved(gain: float) -> tuple[list[float], list[float]]:
        hard = random.beta(0.3, 3, 30)
        return tuple((random.binomial(8, one) / 8).tolist() for one in (hard, hard + (1 - hard) * gain))  # type: ignore[return-value]

    nothing = [paired_difference(*solved(0.0), confidence=0.95).p_value for _ in range(120)]
    assert np.mean([value <= 0.05 for value in nothing]) <= 0.08
    found = [paired_difference(*solved(0.1), confidence=0.95).difference for _ in range(120)]
    gain = 0.1 * (1 - 0.3 / 3.3)
    assert np.mean([one.low <= gain <= one.high for one in found if one.low is not None and one.high is not None]) > 0.9
    assert sum(one.low is not None and one.low > 0 for one in found) > 60
