"""The clipped surrogate of a ratio: of tokens in PPO, GRPO, Dr.GRPO and DAPO, of sequences in GSPO."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.trainer.rl.losses.base import Counts, Objective, PolicyLossInput, log_ratios, over_sequences


def clipped_objective(config: PolicyLossConfig) -> Objective:
    """Return the clipped surrogate of PPO with given advantages (Schulman et al. 2017, eq. 7).

    The `clipped_surrogate` of rho_t = exp(log_ratios), which differs by `aggregation` and clip range in

    - `ppo` (Schulman et al. 2017): token.
    - `grpo` (Shao et al. 2024, "DeepSeekMath", eq. 3, without its KL term): sequence.
    - `dr_grpo` (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2): constant.
    - `dapo` (Yu et al. 2025, "DAPO", eq. 8): token, and clip_high above clip_low.
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        return clipped_surrogate(torch.exp(log_ratios(data, config)), data.advantages_N, config)

    return objective


def gspo_objective(config: PolicyLossConfig) -> Objective:
    """Return GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5).

    The `clipped_surrogate` of s = exp(mean over the sequence of log_ratios), the same for all tokens of a sequence
    (eq. 7). Counts are tokens of clipped sequences.
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        mean_N = over_sequences(log_ratios(data, config), data, torch.mean)
        return clipped_surrogate(torch.exp(mean_N), data.advantages_N, config)

    return objective


def gspo_token_objective(config: PolicyLossConfig) -> Objective:
    """Return GSPO-token (Zheng et al. 2025, eqs. 13 and 14), for advantages that differ within a sequence.

    The `clipped_surrogate` of s_t = sg(s) pi_t / sg(pi_t), with s as in `gspo_objective` and sg: no gradient. Its value
    is s; its gradient is s times that of the token's own log-probability. With one advantage per sequence, and
    `aggregation = "sequence"`, loss and gradient are those of `gspo`.
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        mean_N = over_sequences(log_ratios(data, config).detach(), data, torch.mean)
        # 0 in value: it brings in the gradient of the token alone.
        own_N = data.logprobs_N - data.logprobs_N.detach()
        return clipped_surrogate(torch.exp(mean_N + own_N), data.advantages_N, config)

    return objective


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, config: PolicyLossConfig) -> tuple[Tensor, Counts]:
    """Return min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), where A < 0 at least `dual_clip` A, and counts.

    The second bound is dual clip (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement
    Learning", eq. 5; the two-sided clip of INTELLECT-2). Counts are of the tokens that each bound takes the gradient
    from: clipping stops it only where it lowers the objective, hence the signs.
    """
    assert config.dual_clip is not None  # the config fills it in
    low, high = config.clip_range
    clipped_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    dual_N = (ratio_N > config.dual_clip) & (advantages_N < 0)
    # Where A < 0 the surrogate is unbounded below in rho: dual clip bounds it, and its gradient.
    return torch.where(dual_N, config.dual_clip * advantages_N, clipped_N), {
        **clip_counts(ratio_N, advantages_N, low, high),
        "clip_fraction/dual": dual_N.sum(),
    }


@torch.no_grad()
def clip_counts(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Counts:
    """Return how many tokens lie outside of [low, high] on the side where their advantage pushes."""
    below_N = (ratio_N < low) & (advantages_N < 0)
    above_N = (ratio_N > high) & (advantages_N > 0)
    return {"clip_fraction/low": below_N.sum(), "clip_fraction/high": above_N.sum()}
