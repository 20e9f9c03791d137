"""What must not learn: advantages and losses with a fault each, through the seams that everyone's own have.

Each is GRPO but for its fault. A recipe that learned with one of them would show nothing about the algorithms.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast import PolicyLossInput, ScoredRollout

_CLIP = 0.2


def permuted_rewards(groups: list[list[ScoredRollout]]) -> list[list[float]]:
    """Return GRPO's advantages of rewards that belong to other rollouts of the same problem."""
    return [_normalised([group[place - len(group) // 2].reward for place in range(len(group))]) for group in groups]


def zero_advantages(groups: list[list[ScoredRollout]]) -> list[list[float]]:
    """Return nothing to learn from."""
    return [[0.0 for _ in group] for group in groups]


def negated_advantages(groups: list[list[ScoredRollout]]) -> list[list[float]]:
    """Return GRPO's advantages with the other sign."""
    return [[-one for one in _normalised([rollout.reward for rollout in group])] for group in groups]


def inverted_ratio(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss with the ratio of the sampler to the policy."""
    return _clipped(data, data.sampler_logprobs_N - data.logprobs_N)


def shifted_logprobs(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss with the sampler's log-probability of the token before in the place of the token's own."""
    return _clipped(data, data.logprobs_N - data.sampler_logprobs_N.roll(1))


def _normalised(rewards_G: Sequence[float]) -> list[float]:
    mean, spread = statistics.fmean(rewards_G), statistics.stdev(rewards_G)
    return [(reward - mean) / (spread + 1e-6) for reward in rewards_G]


def _clipped(data: PolicyLossInput, log_ratio_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, as a mean over the tokens of a sequence and then over sequences."""
    ratio_N = torch.exp(log_ratio_N.clamp(-20, 20))
    clipped_N = ratio_N.clamp(1 - _CLIP, 1 + _CLIP)
    objective_N = torch.minimum(ratio_N * data.advantages_N, clipped_N * data.advantages_N)
    is_clipped_N = objective_N < ratio_N * data.advantages_N
    return -(data.weights_N * objective_N).sum(), {"faulty_clipped": is_clipped_N.sum()}
