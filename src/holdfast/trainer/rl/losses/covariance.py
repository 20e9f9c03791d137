"""Losses that hold back the few tokens that lower the entropy most: Clip-Cov and KL-Cov."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.trainer.rl.losses.base import Counts, Objective, PolicyLossInput, log_ratios
from holdfast.trainer.rl.losses.clipped import clipped_surrogate


def clip_cov_objective(config: PolicyLossConfig) -> Objective:
    """Return Clip-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for ...", eq. 11).

    The `clipped_surrogate` of rho_t = exp(log_ratios), and 0 for the tokens that
    `holdfast.trainer.rl.batches.token_selection` chose: a random share of those with a high covariance of
    log-probability and advantage.
    """

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        objective_N, counts = clipped_surrogate(torch.exp(log_ratios(data, config)), data.advantages_N, config)
        chosen_N = data.high_covariance_N > 0
        return torch.where(chosen_N, 0.0, objective_N), counts | {"covariance/selected": chosen_N.sum()}

    return objective


def kl_cov_objective(config: PolicyLossConfig) -> Objective:
    """Return KL-Cov (Cui et al. 2025, eq. 12).

    The `clipped_surrogate` of rho_t = exp(log_ratios), less coef |log rho_t| for the tokens that
    `holdfast.trainer.rl.batches.token_selection` chose: those with the highest covariance of log-probability and
    advantage. The penalty is that of the authors' code, whose surrogate is not clipped.
    """
    coef = config.covariance.coef
    assert coef is not None  # the config fills it in

    def objective(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        log_ratio_N = log_ratios(data, config)
        objective_N, counts = clipped_surrogate(torch.exp(log_ratio_N), data.advantages_N, config)
        counts |= {"covariance/selected": data.high_covariance_N.sum()}
        return objective_N - coef * data.high_covariance_N * log_ratio_N.abs(), counts

    return objective
