"""What an advantage is, and what several of them share.

Shape legend: G rollouts of one problem, T sampled tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.trainer.rl.advantages.scored_rollouts import Groups

# Added to the variance, as in `masked_whiten` of TRL and verl.
_WHITEN_EPSILON = 1e-8


AdvantageValue = float | Sequence[float] | np.ndarray
"""What an advantage gives a rollout: one number, or one for each of its T sampled tokens."""


Advantage = Callable[[Groups], Sequence[Sequence[AdvantageValue]]]


RewardsAdvantage = Callable[[Sequence[float]], list[float]]
"""From the rewards of one problem, (G,), to as many advantages."""


def sample_std(values_G: Sequence[float]) -> float:
    """Return the sample standard deviation (denominator G - 1); 0 when all values are equal."""
    if max(values_G) == min(values_G):
        return 0.0
    mean = math.fsum(values_G) / len(values_G)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values_G) / (len(values_G) - 1))


def rewards_to_go(rewards_T: np.ndarray) -> np.ndarray:
    """Return for each token the sum of its reward and all later ones, (T,)."""
    return np.cumsum(rewards_T[::-1])[::-1]


def whiten(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays with mean 0 and variance 1 over all their numbers: `(v - mean) / sqrt(var + 1e-8)`.

    The sample variance, as in `masked_whiten` of TRL and verl. Numbers that are all equal give exactly 0.
    """
    everything = np.concatenate([np.zeros(0), *values])
    if not len(everything) or everything.min() == everything.max():
        return [np.zeros(len(own)) for own in values]
    mean, std = everything.mean(), math.sqrt(everything.var(ddof=1) + _WHITEN_EPSILON)
    return [(own - mean) / std for own in values]
