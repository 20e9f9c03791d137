"""Losses: pure functions of per-token tensors that return (loss, metrics).

Every loss is a weighted sum over the predicted tokens of this forward pass; the weights carry the
denominator, which is global: it counts the whole optimizer step over all ranks and micro-batches.
So the sum over micro-batches and ranks is the loss of the step, however it was split.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triad.config.trainer import GrpoLossConfig


@dataclass(frozen=True)
class PolicyLossInput:
    """What a policy loss sees.

    Attributes:
        logprobs_N: log-probabilities under the weights being trained; carries the gradient.
        sampler_logprobs_N: log-probabilities under the sampler when the tokens were drawn.
        advantages_N: advantage of each token.
        weights_N: the share of each token in the step's mean; see the loss for its denominator.
    """

    logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


PolicyLoss = Callable[[PolicyLossInput], tuple[Tensor, dict[str, Tensor]]]


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the negative log-likelihood, in nats. Denominator: all trained tokens of the step."""
    return -(weights_N * logprobs_N).sum()


def grpo_loss(config: GrpoLossConfig) -> PolicyLoss:
    """Return GRPO's clipped surrogate (Shao et al. 2024, "DeepSeekMath", eq. 3, without its KL term).

    loss = - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t), with
    rho = exp(l_new - l_sampler). Denominator (in w): 1 / (number of rollouts of the step * tokens
    of the rollout), so each rollout counts the same, whatever its length.
    """

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_N = torch.exp(data.logprobs_N - data.sampler_logprobs_N)
        clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
        objective_N = torch.minimum(ratio_N * data.advantages_N, clipped_N * data.advantages_N)
        with torch.no_grad():
            # Clipping stops the gradient only where it lowers the objective, hence the signs.
            low = (ratio_N < 1 - config.clip_low) & (data.advantages_N < 0)
            high = (ratio_N > 1 + config.clip_high) & (data.advantages_N > 0)
            counts = {"clip_fraction/low": low.sum(), "clip_fraction/high": high.sum()}
        return -(data.weights_N * objective_N).sum(), counts

    return loss


def k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 = r - 1 - log r per token, r = exp(log_ratio), in nats.

    With samples from q and r = p / q its mean estimates KL(q || p), without bias and never negative
    (J. Schulman, "Approximating KL divergence", 2020). expm1 keeps the digits near r = 1.
    """
    return torch.expm1(log_ratio) - log_ratio
