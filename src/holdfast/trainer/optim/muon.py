"""Muon for the matrices of the hidden layers, AdamW for everything else, as one optimizer.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is Scalable for
LLM Training", whose scaling of updates lets learning rates and weight decay of AdamW carry over.

Shape legend: O outputs, I inputs of a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.trainer.checkpoints.weight_sources import local_part

# Jordan et al. 2024: coefficients that bring singular values to about 1 (0.7 to 1.2) in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7
# Liu et al. 2025, section 2.2: the root mean square of AdamW's usual updates.
_RMS = 0.2


def orthogonalize(matrix_OI: Tensor) -> Tensor:
    """Return about `U V^T` of the matrix `U S V^T`, by five Newton-Schulz steps in bfloat16 as in Jordan's program.

    With X = matrix / |matrix|: `X <- a X + b (X X^T) X + c (X X^T)^2 X`. It needs the whole matrix: that of its rows
    alone, a shard, is another.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix_OI.shape[0] > matrix_OI.shape[1]
    x = matrix_OI.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonWithAdamW(torch.optim.Optimizer):
    """Takes steps of Muon for `matrices`, and of `adamw` for its parameters.

        B <- momentum B + (1 - momentum) G,  O = orthogonalize((1 - momentum) G + momentum B)
        W <- W - lr weight_decay W - lr 0.2 sqrt(max(rows, columns)) O

    The momentum B is sharded as its matrix. Of a sharded matrix every rank gathers the update and orthogonalizes it
    whole, so the numbers do not depend on the ranks. The state of both is in `state`.

    Args:
        matrices: with two dimensions each.
        adamw: has taken no step.
    """

    def __init__(
        self, matrices: Sequence[Tensor], adamw: torch.optim.AdamW, *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        self._adamw = adamw
        own: dict[str, Any] = {"params": list(matrices), "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([own, *adamw.param_groups], {})
        self._adamw.state = self.state
        self._matrices = {id(matrix) for matrix in matrices}

    def has(self, parameter: Tensor) -> bool:
        """Whether Muon takes the steps of `parameter`."""
        return id(parameter) in self._matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - none are used
        """Take one step of both."""
        self._adamw.step()
        group = self.param_groups[0]
        for matrix in group["params"]:
            if matrix.grad is not None:
                self._update(matrix, group)

    def _update(self, matrix_OI: Tensor, group: dict[str, Any]) -> None:
        gradient_OI, state = matrix_OI.grad, self.state[matrix_OI]
        assert gradient_OI is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix_OI)
        momentum_OI = state["momentum_buffer"]
        momentum_OI.lerp_(gradient_OI, 1 - group["momentum"])
        update_OI = _orthogonalized(gradient_OI.lerp(momentum_OI, group["momentum"]))
        matrix_OI.mul_(1 - group["lr"] * group["weight_decay"])
        matrix_OI.add_(update_OI, alpha=-group["lr"] * _RMS * math.sqrt(max(matrix_OI.shape)))


def _orthogonalized(update_OI: Tensor) -> Tensor:
    """Return `orthogonalize` of a matrix, sharded or not, in its own dtype and sharded alike. Collective."""
    if not isinstance(update_OI, DTensor):
        return orthogonalize(update_OI).to(update_OI.dtype)
    # Where the ranks compute: an offloaded matrix is on the host, where this would take too long.
    whole_OI = orthogonalize(update_OI.full_tensor().to(update_OI.device_mesh.device_type)).to(update_OI.dtype)
    sharded_OI = torch.empty_like(update_OI)
    own, region = local_part(sharded_OI)
    own.copy_(whole_OI[region])
    return sharded_OI
