"""Policy losses: pure functions of per-token tensors that return (loss, counts), chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.policy.losses.base import PolicyLoss, PolicyLossInput
from trainer.policy.losses.clipped import clipped_loss
from trainer.policy.losses.gspo import gspo_loss
from trainer.policy.losses.policy_gradient import cispo_loss, likelihood_loss, policy_gradient_loss
from triad.config.losses import PolicyLossConfig
from triad.errors import TrainingError
from triad.user_functions import load_loss

__all__ = ["PolicyLoss", "PolicyLossInput", "policy_loss"]

_BUILT_IN: dict[str, Callable[[PolicyLossConfig], PolicyLoss]] = {
    "grpo": clipped_loss,
    "dr_grpo": clipped_loss,
    "dapo": clipped_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "ppo": clipped_loss,
    "policy_gradient": policy_gradient_loss,
    "sft": likelihood_loss,
}


def policy_loss(config: PolicyLossConfig) -> PolicyLoss:
    """Return the loss that `config.type` names: a built-in one, or the user's `module:function`.

    A function of the user is called as `function(data, **config.args)` with a `PolicyLossInput` and
    returns what a `PolicyLoss` returns.

    Raises:
        ConfigError: the user's function cannot be loaded, or does not take `config.args`.
    """
    if config.type in _BUILT_IN:
        return _BUILT_IN[config.type](config)
    return _user_loss(config.type, config.args)


def _user_loss(name: str, args: dict[str, Any]) -> PolicyLoss:
    function = load_loss(name, args)

    def loss(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        result = function(data, **args)
        if not (isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[0]) and _are_scalars(result[1])):
            raise TrainingError(
                f"loss '{name}' must return (loss, counts), a scalar tensor that carries the gradient and a dict of "
                f"name -> scalar tensor; got {result!r}"
            )
        return result

    return loss


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and (value.requires_grad or not torch.is_grad_enabled())


def _are_scalars(counts: object) -> bool:
    return isinstance(counts, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.dim() == 0 for name, value in counts.items()
    )
