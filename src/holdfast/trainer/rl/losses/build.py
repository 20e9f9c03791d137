"""Policy losses: pure functions of per-token tensors that return (loss, counts), chosen by name."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.shared.config.registry import POLICY_LOSSES
from holdfast.shared.errors import TrainingError
from holdfast.shared.user_functions import calling, load_built_in, load_loss
from holdfast.trainer.rl.losses.base import Counts, Objective, PolicyLoss, PolicyLossInput, token_weights
from holdfast.trainer.rl.losses.correction import correction_factors

__all__ = ["PolicyLoss", "PolicyLossInput", "build_policy_loss"]


_OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors that come up in any code, also in a loss of the user: a GPU or another rank is gone. A new start may help."""


def build_policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that `config.type` names: a built-in one, or the user's `module:function`.

    A built-in loss is - sum_t w_t c_t objective_t, with the weights of `aggregation` and the factors of
    `correction`. A function of the user is called as `function(data, **config.args)` with a
    `PolicyLossInput` that holds them, and returns what a `PolicyLoss` returns.

    Raises:
        ConfigError: the user's function cannot be loaded, or does not take `config.args`.
    """
    inner = _built_in_loss(config) if config.type in POLICY_LOSSES else _user_loss(config)

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        factors_N, counts = correction_factors(data, config.correction)
        value, own = inner(replace(data, correction_N=factors_N))
        return value, counts | own

    return loss


def _built_in_loss(config: PolicyLossConfig) -> PolicyLoss:
    objective: Objective = load_built_in(POLICY_LOSSES[config.type].function, package="holdfast.trainer.rl.losses")(
        config
    )

    def loss(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        objective_N, counts = objective(data)
        weights_N = token_weights(data, config) * data.correction_N
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
