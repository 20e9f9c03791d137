"""GSPO: one importance ratio for the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.policy.losses.base import PolicyLoss, PolicyLossInput, clip_counts, over_sequences, token_weights
from trainer.policy.losses.correction import correction_weights, log_ratios, summed
from triad.config.losses import PolicyLossConfig


def gspo_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the sequence-level clipped surrogate (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5).

    loss = - sum_t w_t min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t), with
    s = exp(mean over the sequence of l_new - l_sampler), the same for all tokens of a sequence (eq. 7).
    Denominator (in w) by `aggregation`, see `token_weights`; the paper's is sequence. Clip counts are
    tokens of clipped sequences.
    """
    low, high = config.clip_range

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_N = torch.exp(over_sequences(log_ratios(data, config.correction), data.sequence_N, torch.mean))
        clipped_N = ratio_N.clamp(low, high)
        objective_N = torch.minimum(ratio_N * data.advantages_N, clipped_N * data.advantages_N)
        factors_N, counts = correction_weights(data, config.correction)
        counts |= clip_counts(ratio_N, data.advantages_N, low, high)
        return summed(token_weights(data, config), objective_N, factors_N), counts

    return loss
