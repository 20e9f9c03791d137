"""Advantages: how much better a rollout is than its siblings of the same problem, or than the batch.

Shape legend: P problems of the batch, G rollouts of one problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

from triad.errors import TrainingError
from triad.user_functions import load_function

# Added to the standard deviation, as in verl's `compute_grpo_outcome_advantage`.
_EPSILON = 1e-6

GroupAdvantage = Callable[[Sequence[float]], list[float]]
BatchAdvantage = Callable[[list[list[float]]], list[list[float]]]
"""From the rewards of a batch, problem by problem, to as many advantages."""


def sample_std(values_G: Sequence[float]) -> float:
    """Return the sample standard deviation (denominator G - 1); 0 when all values are equal."""
    if max(values_G) == min(values_G):
        return 0.0
    mean = math.fsum(values_G) / len(values_G)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values_G) / (len(values_G) - 1))


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean(r)` (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2).

    Equal rewards give exactly 0, whatever their mean rounds to.
    """
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / (std(r) + 1e-6)` (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    The paper leaves the kind of std open; this is the sample std (G - 1), as `torch.std` gives it in
    TRL's GRPOTrainer and in verl, whose epsilon it takes too.
    """
    std = sample_std(rewards_G)
    return [centred / (std + _EPSILON) for centred in dr_grpo(rewards_G)]


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean of the others` (Ahmadian et al. 2024, "Back to Basics").

    That is G / (G - 1) times `r_i - mean(r)`. A group of one has no others: 0.
    """
    size = len(rewards_G)
    return [centred * size / max(1, size - 1) for centred in dr_grpo(rewards_G)]


def max_rl(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / mean(r)` (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning").

    The rarer a reward is in its group, the more it counts.
    For rewards of at least 0, such as 1 for success. Equal rewards, all 0 too, give exactly 0.

    Raises:
        TrainingError: a reward is negative.
    """
    if min(rewards_G) < 0:
        raise TrainingError(
            f"advantage = 'max_rl' divides by the mean reward and needs rewards of at least 0, got {min(rewards_G)}. "
            "Shift the rewards, or choose another advantage."
        )
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [centred / mean if centred else 0.0 for centred in dr_grpo(rewards_G)]


def reinforce_pp(rewards_PG: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return `(r - mean) / (std + 1e-6)` over the whole batch (Hu et al. 2025, "REINFORCE++", global normalisation).

    The KL penalty of the paper's reward is not in it. Mean and sample std count every rollout once;
    the paper counts tokens.
    """
    whitened = iter(grpo(list(chain.from_iterable(rewards_PG))))
    return [[next(whitened) for _ in rewards_G] for rewards_G in rewards_PG]


def reinforce_pp_baseline(rewards_PG: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return `r - mean` of the group, divided by its std + 1e-6 over the batch (Hu et al. 2025, "w/ baseline")."""
    return reinforce_pp([dr_grpo(rewards_G) for rewards_G in rewards_PG])


_OF_A_GROUP: dict[str, GroupAdvantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "max_rl": max_rl}
_OF_A_BATCH: dict[str, BatchAdvantage] = {
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def choose_advantage(name: str) -> BatchAdvantage:
    """Return the advantage that `name` stands for: a built-in one, or the user's `module:function`.

    A function of the user gets the rewards of the batch as a list of lists, problem by problem, and
    returns as many finite numbers.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """
    if name in _OF_A_GROUP:
        of_group = _OF_A_GROUP[name]
        return lambda rewards_PG: [of_group(rewards_G) for rewards_G in rewards_PG]
    if name in _OF_A_BATCH:
        return _OF_A_BATCH[name]
    return _user_advantage(name)


def _user_advantage(name: str) -> BatchAdvantage:
    function = load_function(name, key="advantage")

    def advantage(rewards_PG: list[list[float]]) -> list[list[float]]:
        try:
            advantages_PG = [[float(value) for value in group] for group in function(rewards_PG)]
        except Exception as error:
            raise TrainingError(f"advantage = '{name}' failed: {type(error).__name__}: {error}") from error
        sizes, wanted = [len(group) for group in advantages_PG], [len(group) for group in rewards_PG]
        if sizes != wanted:
            raise TrainingError(f"advantage = '{name}' returned groups of {sizes} numbers for groups of {wanted}")
        if not all(math.isfinite(value) for value in chain.from_iterable(advantages_PG)):
            raise TrainingError(f"advantage = '{name}' returned a number that is not finite: {advantages_PG}")
        return advantages_PG

    return advantage
