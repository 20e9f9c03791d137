"""Estimates from several samples of several tasks, and how sure they are.

All are means over tasks, so the tasks are what is resampled: samples of one task are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLES = 10_000
_RESAMPLED_AT_ONCE = 1_000_000
_SEED = 0
"""Of the resampling: the same rollouts give the same intervals."""
_MOST_EXACT_TASKS = 16
"""With so many differences all 2^n signs are tried."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks.

    Attributes:
        value: the mean.
        low: lower end of its confidence interval; None where one task says nothing about others.
        high: upper end.
    """

    value: float
    low: float | None
    high: float | None


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the chance that at least one of `k` samples solves a problem: `1 - C(n - c, k) / C(n, k)`.

    The unbiased estimator from `num_samples` = n samples, `num_solved` = c of which solved it (Chen et al.
    2021, "Evaluating Large Language Models Trained on Code", section 2.1).
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def powers_up_to(num_samples: int) -> list[int]:
    """Return the k of pass@k that are shown for so many samples: powers of two, and the number itself."""
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def mean_over_tasks(values: Sequence[float], *, confidence: float) -> Estimate:
    """Return the mean of one value per task with a confidence interval.

    The interval is Wilson's where every value is 0 or 1, else the percentile bootstrap over tasks (Efron and
    Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13), which would be a point where all are equal.
    """
    value = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(value, None, None)
    if all(one in (0.0, 1.0) for one in values):
        return Estimate(value, *wilson(round(sum(values)), len(values), confidence=confidence))
    low, high = _percentiles(_means_of_resamples(np.asarray(values)), confidence)
    return Estimate(value, low, high)


def wilson(successes: int, trials: int, *, confidence: float) -> tuple[float, float]:
    """Return the score interval of a share (Wilson 1927, "Probable inference, the law of succession, ...").

    With z the normal quantile and p the share: (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n). Unlike the
    bootstrap and p ± z√(p(1 - p)/n) it is no point where none or all succeed.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, scale = successes / trials, 1 + z * z / trials
    center = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    # At the ends the two terms are equal but for rounding.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == trials else min(1.0, center + half)
    return low, high


@dataclass(frozen=True)
class PairedDifference:
    """How much higher the second of two values per task is.

    Attributes:
        difference: mean over tasks of second - first, with the percentile bootstrap's interval.
        p_value: of the sign-flip test, two-sided: the chance of a mean at least as far from 0 were the two equal.
        num_higher: tasks where the second is higher.
        num_lower: where it is lower.
    """

    difference: Estimate
    p_value: float
    num_higher: int
    num_lower: int


def paired_difference(first: Sequence[float], second: Sequence[float], *, confidence: float) -> PairedDifference:
    """Compare two values of each task.

    The test is Fisher's randomization test for pairs (Fisher 1935, "The Design of Experiments", section 21; in this
    field Dror et al. 2018, "The Hitchhiker's Guide to Testing Statistical Significance in NLP"): were the two equally
    good, each difference would have either sign with the same chance. All signs are tried for up to 16 tasks that
    differ, 10,000 at random for more, where p = (1 + hits) / (1 + trials) (Phipson and Smyth 2010).
    """
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    mean = math.fsum(differences) / len(differences)
    if len(differences) == 1:
        estimate = Estimate(mean, None, None)
    else:
        estimate = Estimate(mean, *_percentiles(_means_of_resamples(differences), confidence))
    return PairedDifference(
        estimate, _sign_flip(differences), int((differences > 0).sum()), int((differences < 0).sum())
    )


def _sign_flip(differences: np.ndarray) -> float:
    nonzero = differences[differences != 0]
    number = len(nonzero)
    if number == 0:
        return 1.0
    observed = abs(nonzero.sum())
    allowed = observed * (1 - 1e-9)  # sums in another order differ by their rounding
    if number <= _MOST_EXACT_TASKS:
        bits = np.arange(2**number)[:, None] >> np.arange(number) & 1
        return float((np.abs((2 * bits - 1) @ nonzero) >= allowed).mean())
    generator = np.random.default_rng(_SEED)
    hits = 0
    for size in _pieces(number):
        signs = generator.integers(0, 2, (size, number)) * 2 - 1
        hits += int((np.abs(signs @ nonzero) >= allowed).sum())
    return (1 + hits) / (1 + _RESAMPLES)


def _means_of_resamples(values: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(_SEED)
    number = len(values)
    pieces = [values[generator.integers(0, number, (size, number))].mean(axis=1) for size in _pieces(number)]
    return np.concatenate(pieces)


def _pieces(number: int) -> list[int]:
    """Return how many resamples of `number` values to draw at a time, so that memory stays bounded."""
    most = max(1, _RESAMPLED_AT_ONCE // number)
    return [min(most, _RESAMPLES - done) for done in range(0, _RESAMPLES, most)]


def _percentiles(means: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
