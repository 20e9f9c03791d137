"""AdamW and clipping; the learning rate of a step comes from `triad.config.schedule`."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from triad.config.trainer import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019) with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
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


def update_parameters(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Take one optimizer step at learning rate `lr` and clear the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
