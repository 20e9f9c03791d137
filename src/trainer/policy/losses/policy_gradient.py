"""Losses in the log-probability itself: CISPO (importance weight clipped), REINFORCE (none), plain likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.policy.losses.base import PolicyLoss, PolicyLossInput, clip_counts, token_weights
from trainer.policy.losses.correction import correction_weights, log_ratios, summed
from triad.config.losses import PolicyLossConfig


def cispo_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return CISPO (MiniMax 2025, "MiniMax-M1", eqs. 4 and 5).

    loss = - sum_t w_t sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t l_t, with
    rho = exp(l_new - l_sampler) and sg: no gradient. Clipping bounds a token's weight but never takes
    its gradient away; the clip counts say where it bounds. Denominator (in w) by `aggregation`, see
    `token_weights`; the paper's is token.
    """
    low, high = config.clip_range

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_N = torch.exp(log_ratios(data, config.correction)).detach()
        objective_N = ratio_N.clamp(low, high) * data.advantages_N * data.logprobs_N
        factors_N, counts = correction_weights(data, config.correction)
        counts |= clip_counts(ratio_N, data.advantages_N, low, high)
        return summed(token_weights(data, config), objective_N, factors_N), counts

    return loss


def policy_gradient_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return REINFORCE (Williams 1992) with given advantages, as RLOO uses it (Ahmadian et al. 2024, "Back to Basics").

    loss = - sum_t w_t A_t l_t. It has no importance ratio, so rollouts of older weights bias it unless a
    correction is on. Denominator (in w) by `aggregation`, see `token_weights`; `constant` is the
    policy gradient of the whole sequence's log-probability, times 1 / constant_tokens.
    """

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        factors_N, counts = correction_weights(data, config.correction)
        return summed(token_weights(data, config), data.advantages_N * data.logprobs_N, factors_N), counts

    return loss


def likelihood_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the negative log-likelihood of the rollouts, whatever their advantage: loss = - sum_t w_t l_t.

    For rollouts of a teacher (hard distillation; Kim and Rush 2016, "Sequence-Level Knowledge Distillation").
    Denominator (in w) by `aggregation`, see `token_weights`.
    """

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        factors_N, counts = correction_weights(data, config.correction)
        return summed(token_weights(data, config), data.logprobs_N, factors_N), counts

    return loss
