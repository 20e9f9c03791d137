"""The clipped surrogate per token: PPO, GRPO, Dr.GRPO and DAPO. They differ in clip range and denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.policy.losses.base import PolicyLoss, PolicyLossInput, clip_counts, token_weights
from trainer.policy.losses.correction import correction_weights, log_ratios, summed
from triad.config.losses import PolicyLossConfig


def clipped_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the clipped surrogate of PPO with given advantages (Schulman et al. 2017, eq. 7).

    loss = - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t), with
    rho = exp(l_new - l_sampler). Denominator (in w) by `aggregation`, see `token_weights`:

    - `ppo` (Schulman et al. 2017): token.
    - `grpo` (Shao et al. 2024, "DeepSeekMath", eq. 3, without its KL term): sequence.
    - `dr_grpo` (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2): constant.
    - `dapo` (Yu et al. 2025, "DAPO", eq. 8): token, and clip_high above clip_low.
    """
    low, high = config.clip_range

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_N = torch.exp(log_ratios(data, config.correction))
        clipped_N = ratio_N.clamp(low, high)
        objective_N = torch.minimum(ratio_N * data.advantages_N, clipped_N * data.advantages_N)
        factors_N, counts = correction_weights(data, config.correction)
        counts |= clip_counts(ratio_N, data.advantages_N, low, high)
        return summed(token_weights(data, config), objective_N, factors_N), counts

    return loss
