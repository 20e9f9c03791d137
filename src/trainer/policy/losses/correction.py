"""Importance ratios, and their correction where sampler and trainer disagree about the same weights.

Without a correction the ratio of a loss is pi / mu: trained policy over sampler. With one it splits in
two, pi / mu = (pi / pi_old) * (pi_old / mu), where pi_old is the trainer's policy at the start of the
step. The loss clips the first factor; the second, which the optimizer cannot change, is bounded here.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.policy.losses.base import PolicyLossInput, over_sequences
from triad.config.losses import CorrectionConfig


def log_ratios(data: PolicyLossInput, config: CorrectionConfig) -> Tensor:
    """Return log(pi / mu) per token, or log(pi / pi_old) with a correction; carries the gradient, (N,)."""
    return data.logprobs_N - (data.sampler_logprobs_N if config.type == "none" else data.old_logprobs_N)


def correction_weights(data: PolicyLossInput, config: CorrectionConfig) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the factor of each token's objective, (N,), without gradient, and how many tokens it bounded.

    With w = pi_old / mu, of the token or, with `level = "sequence"`, the product over its sequence:

    - `truncate`: min(w, high). Truncated importance sampling (Ionides 2008; for this mismatch Yao et al.
      2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    - `mask`: w where low <= w <= high, else 0 (per token: IcePop of Ling Team 2025, "Every Step
      Evolves"; per sequence: Liu et al. 2025, "When Speed Kills Stability").

    The denominator of the loss stays as it is: what is masked counts as 0, not as absent.
    None and no counts without a correction.
    """
    if config.type == "none":
        return None, {}
    with torch.no_grad():
        log_weights_N = data.old_logprobs_N.detach() - data.sampler_logprobs_N
        if config.level == "sequence":
            log_weights_N = over_sequences(log_weights_N, data.sequence_N, torch.sum)
        weights_N = log_weights_N.exp()
        if config.type == "truncate":
            return weights_N.clamp(max=config.high), {"correction/bounded": (weights_N > config.high).sum()}
        kept_N = (weights_N >= config.low) & (weights_N <= config.high)
        return torch.where(kept_N, weights_N, 0.0), {"correction/bounded": (~kept_N).sum()}


def summed(weights_N: Tensor, objective_N: Tensor, factors_N: Tensor | None) -> Tensor:
    """Return the loss: minus the sum of the objective times weight and, where there is one, factor."""
    corrected_N = objective_N if factors_N is None else factors_N * objective_N
    return -(weights_N * corrected_N).sum()
