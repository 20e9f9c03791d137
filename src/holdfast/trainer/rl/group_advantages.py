"""Advantages that take the rewards of one problem and nothing else: for any training loop, without torch.

Shape legend: G rollouts of one problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import TrainingError

# Added to the standard deviation, as in verl's `compute_grpo_outcome_advantage`.
STD_EPSILON = 1e-6


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
    # The mean of equal rewards may round, and GRPO would divide that by its epsilon.
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / (std(r) + 1e-6)` (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    The std is the sample std (G - 1), as in TRL's GRPOTrainer and in verl; the epsilon is verl's. The paper does not
    say which std it uses.
    """
    std = sample_std(rewards_G)
    return [centred / (std + STD_EPSILON) for centred in dr_grpo(rewards_G)]


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean of the others` (Ahmadian et al. 2024, "Back to Basics").

    That is G / (G - 1) times `r_i - mean(r)`. A group of one has no others: 0.
    """
    size = len(rewards_G)
    # At least 1: a group of one has no others
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
    return [centred / mean if centred else 0.0 for centred in dr_grpo(rewards_G)]  # where the mean is 0, all are


def pass_at_k(rewards_G: Sequence[float], *, k: int) -> list[float]:
    """Return by how much a rollout raises the best reward of `k`: the mean of `max(S) - max(S without i)`.

    The mean is over all sets S of `k` rollouts of the group with rollout i among them. With rewards of 0 and 1 it
    raises pass@k; times k / G it is `s^(loo - 1)` of Walder and Karkhanis 2025, "Pass@K Policy Optimization", and with
    k = G the estimate of Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using
    Reinforcement Learning": the best less the second best for the best, 0 for the others (verl's `grpo_passk` without
    its division by the std). It is never negative.

    Raises:
        TrainingError: there are fewer than `k` rollouts.
    """
    size = len(rewards_G)
    if size < k:
        raise TrainingError(
            f"advantage = 'pass_at_k' takes the best of advantage_k = {k} rollouts, and a problem has {size}: lower "
            "advantage_k, or raise orchestrator.group_size"
        )
    advantages = []
    for index, reward in enumerate(rewards_G):
        others = sorted([*rewards_G[:index], *rewards_G[index + 1 :]])
        # The best of k - 1 others is the one of rank `rank` for this share of all choices.
        shares = [math.comb(rank, k - 2) / math.comb(size - 1, k - 1) for rank in range(size - 1)]
        gains = [share * max(reward - other, 0.0) for share, other in zip(shares, others, strict=True)]
        advantages.append(math.fsum(gains))
    return advantages


def opo(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> list[float]:
    """Return `r_i - sum(l r) / sum(l)`, `l` being the sampled tokens of a rollout.

    The baseline of least variance where the gradients of tokens are alike and independent (Hao et al. 2025, "On-Policy
    RL with Optimal Reward Baseline"; verl's `compute_opo_outcome_advantage`). Equal rewards give exactly 0.
    """
    total = sum(lengths_G)
    if total == 0 or max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    baseline = math.fsum(length * reward for length, reward in zip(lengths_G, rewards_G, strict=True)) / total
    return [reward - baseline for reward in rewards_G]
