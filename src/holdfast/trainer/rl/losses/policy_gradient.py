"""Objectives in the log-probability itself, times a ratio without gradient: CISPO, REINFORCE, DPPO, likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.trainer.rl.losses.base import Counts, Objective, PolicyLossInput, log_ratios
from holdfast.trainer.rl.losses.clipped import clip_counts


def cispo_objective(config: PolicyLossConfig) -> Objective:
    """Return CISPO (MiniMax 2025, "MiniMax-M1", eqs. 4 and 5): sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t l_t.

    With rho = exp(log_ratios) and sg: no gradient. Clipping bounds a token's weight but never takes its gradient away;
    the clip counts say where it bounds.
    """
    low, high = config.clip_range

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        ratio_N = torch.exp(log_ratios(data, config)).detach()
        counts = clip_counts(ratio_N, data.advantages_N, low, high)
        return ratio_N.clamp(low, high) * data.advantages_N * data.logprobs_N, counts

    return objective


def policy_gradient_objective(config: PolicyLossConfig) -> Objective:
    """Return REINFORCE (Williams 1992) with given advantages, as RLOO uses it (Ahmadian et al. 2024, "Back to Basics").

    sg(min(rho_t, ratio_max)) A_t l_t, with rho = exp(log_ratios): importance sampling of the policy gradient, truncated
    (Ionides 2008), so that older rollouts, further epochs and replay do not bias it but for the truncation. Where rho
    is 1, as with `ratio_to = "old"` and one update a step, it is REINFORCE. With `aggregation = "constant"` it is the
    policy gradient of the whole sequence's log-probability, times 1 / constant_tokens.
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        ratio_N, counts = _truncated_ratios(data, config)
        return ratio_N * data.advantages_N * data.logprobs_N, counts

    return objective


def dppo_objective(config: PolicyLossConfig) -> Objective:
    """Return DPPO with the binary total variation (arXiv 2602.04879, "Rethinking the Trust Region in LLM RL").

    m_t sg(min(rho_t, ratio_max)) A_t l_t, with rho = exp(log_ratios), p and b the probabilities of the token under
    policy and base, and m_t = 0 where the policy has gone too far already: p - b > clip_high and A > 0, or
    p - b < -clip_low and A < 0. It bounds what moves probability, not its ratio: rare tokens may multiply theirs.
    The truncation is that of section 5.4.
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        assert config.clip_low is not None and config.clip_high is not None  # the config fills them in
        ratio_N, counts = _truncated_ratios(data, config)
        with torch.no_grad():
            base_N = data.old_logprobs_N if config.ratio_to == "old" else data.sampler_logprobs_N
            moved_N = data.logprobs_N.exp() - base_N.exp()
            counts |= clip_counts(moved_N, data.advantages_N, -config.clip_low, config.clip_high)
            high_N = (moved_N > config.clip_high) & (data.advantages_N > 0)
            low_N = (moved_N < -config.clip_low) & (data.advantages_N < 0)
        return torch.where(high_N | low_N, 0.0, ratio_N * data.advantages_N * data.logprobs_N), counts

    return objective


def likelihood_objective(config: PolicyLossConfig) -> Objective:
    """Return the log-likelihood of the rollouts, whatever their advantage: l_t.

    For rollouts of a teacher (hard distillation; Kim and Rush 2016, "Sequence-Level Knowledge Distillation").
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        return data.logprobs_N, {}

    return objective


@torch.no_grad()
def _truncated_ratios(data: PolicyLossInput, config: PolicyLossConfig) -> tuple[Tensor, Counts]:
    assert config.ratio_max is not None  # the config fills it in
    ratio_N = torch.exp(log_ratios(data, config))
    return ratio_N.clamp(max=config.ratio_max), {"ratio/truncated": (ratio_N > config.ratio_max).sum()}
