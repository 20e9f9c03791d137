"""Policy losses: pure functions of per-token tensors that return (loss, counts), chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.shared.errors import TrainingError
from holdfast.shared.user_functions import calling, load_loss
from holdfast.trainer.rl.losses.base import Counts, Objective, PolicyLoss, PolicyLossInput, token_weights
from holdfast.trainer.rl.losses.clipped import clipped_objective, gspo_objective, gspo_token_objective
from holdfast.trainer.rl.losses.correction import correction_factors
from holdfast.trainer.rl.losses.covariance import clip_cov_objective, kl_cov_objective
from holdfast.trainer.rl.losses.policy_gradient import (
    cispo_objective,
    dppo_objective,
    likelihood_objective,
    policy_gradient_objective,
)

__all__ = ["PolicyLoss", "PolicyLossInput", "build_policy_loss"]


_BUILT_IN: dict[str, Callable[[PolicyLossConfig], Objective]] = {
    "grpo": clipped_objective,
    "dr_grpo": clipped_objective,
    "dapo": clipped_objective,
    "ppo": clipped_objective,
    "gspo": gspo_objective,
    "gspo_token": gspo_token_objective,
    "clip_cov": clip_cov_objective,
    "kl_cov": kl_cov_objective,
    "cispo": cispo_objective,
    "dppo": dppo_objective,
    "policy_gradient": policy_gradient_objective,
    "sft": likelihood_objective,
}


_OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors that come up in any code, also in a loss of the user: a GPU or another rank is gone. A new start may help."""


def build_policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that `config.type` names: a built-in one, or the user's `module:function`.

    A built-in loss is - sum_t w_t m_t c_t objective_t, with the weights of `aggregation`, the selection m and the
    factors of `correction`. A function of the user is called as `function(data, **config.args)` with a
    `PolicyLossInput` that holds them, and returns what a `PolicyLoss` returns.

    Raises:
        ConfigError: the user's function cannot be loaded, or does not take `config.args`.
    """
    inner = _sum_of(_BUILT_IN[config.type](config), config) if config.type in _BUILT_IN else _user_loss(config)

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        factors_N, counts = correction_factors(data, config.correction)
        value, own = inner(replace(data, correction_N=factors_N))
        if config.top_entropy_share < 1:
            counts["top_entropy/selected"] = data.selected_N.sum()
        return value, counts | own

    return loss


def _sum_of(objective: Objective, config: PolicyLossConfig) -> PolicyLoss:
    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        objective_N, counts = objective(data)
        weights_N = token_weights(data, config) * data.selected_N * data.correction_N
        return -(weights_N * objective_N).sum(), counts

    return loss


def _user_loss(config: PolicyLossConfig) -> PolicyLoss:
    function = load_loss(config.type, config.args)

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        with calling(config.type, key="loss.type", unless=_OF_THE_MACHINE):
            result = function(data, **config.args)
        if not (isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[0]) and _are_scalars(result[1])):
            raise TrainingError(
                f"loss '{config.type}' must return (loss, counts), a scalar tensor that carries the gradient and a "
                f"dict of name -> scalar tensor; got {result!r}"
            )
        return result

    return loss


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and (value.requires_grad or not torch.is_grad_enabled())


def _are_scalars(counts: object) -> bool:
    return isinstance(counts, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.dim() == 0 for name, value in counts.items()
    )
