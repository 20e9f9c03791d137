"""Optimizers, clipping, and the check of a step before it is applied.

The learning rate of a step comes from `holdfast.shared.config.schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from holdfast.shared.config.trainer import OptimConfig
from holdfast.shared.errors import GO_ON_OR_BEGIN_AGAIN, TrainingError
from holdfast.trainer.models.structure import decoder_layers
from holdfast.trainer.optim.muon import MuonWithAdamW


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019) with weight decay on matrices only, or Muon beside it.

    Muon is for transformers models, whose hidden layers are known.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.type == "adamw":
        return _adamw(trained, config)
    assert isinstance(model, PreTrainedModel)
    hidden = hidden_matrices(model)
    known = {id(matrix) for matrix in hidden}
    rest = _adamw([parameter for parameter in trained if id(parameter) not in known], config)
    return MuonWithAdamW(hidden, rest, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained parameters with two dimensions in the decoder layers, but for tables of embeddings.

    Embeddings, head, norms, biases and stacks of experts (three dimensions) are none.
    """
    layers = decoder_layers(model)
    tables = {id(one.weight) for layer in layers for one in layer.modules() if isinstance(one, nn.Embedding)}
    return [
        parameter
        for layer in layers
        for parameter in layer.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in tables
    ]


def initial_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return what `optimizer` keeps of one parameter, as its first step would make it."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if isinstance(optimizer, MuonWithAdamW) and optimizer.has(parameter):
        return {"momentum_buffer": zeros()}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def _adamw(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)


def check_finite(step: int, *, loss: float, grad_norm: float) -> None:
    """Stop training before a broken update is applied, saved or published.

    Raises:
        TrainingError: loss or gradient norm is NaN or infinite.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise TrainingError(
        f"step {step}: loss is {loss}, gradient norm is {grad_norm}. Nothing of this step was saved or "
        "published. Lower optim.lr, add optim.warmup_steps, lower optim.max_grad_norm, or look at this step's data; "
        f"then {GO_ON_OR_BEGIN_AGAIN}."
    )


def update_parameters(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Take one optimizer step at learning rate `lr` and clear the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
