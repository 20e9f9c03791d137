"""Optimizers (AdamW, Muon), gradient clipping, and the check of a train step before it is applied.

The learning rate of a step comes from `holdfast.config.training`. Muon updates the matrices of the hidden layers, AdamW
all other parameters. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025,
"Muon is Scalable for LLM Training": its scaling of updates lets AdamW's learning rates and weight decay carry over.
A new optimizer is a model in `AnyOptim` of its settings, and a branch of `build_optimizer` and of `initial_moments`.

Shape legend: O outputs, I inputs of a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from holdfast.config.training import MuonConfig, OptimConfig
from holdfast.errors import GO_ON_OR_BEGIN_AGAIN, TrainingError
from holdfast.trainer.checkpoint.init_from import local_part
from holdfast.trainer.model.structure import decoder_layers

# Jordan et al. 2024: coefficients that bring singular values to about 1 (0.7 to 1.2) in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7
# Liu et al. 2025, section 2.2: the root mean square of AdamW's usual updates.
_RMS = 0.2


def orthogonalize(matrix_OI: Tensor) -> Tensor:
    """Return about `U V^T` of the matrix `U S V^T`, by five Newton-Schulz steps in bfloat16 as in Jordan's program.

    With X = matrix / |matrix|: `X <- a X + b (X X^T) X + c (X X^T)^2 X`. It needs the whole matrix, not a shard."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix_OI.shape[0] > matrix_OI.shape[1]
    x = matrix_OI.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class CompactAdamW(torch.optim.AdamW):
    """AdamW that holds its two moments in bfloat16 (DeepSeek-AI 2024, DeepSeek-V3).

    A step widens the moments of one parameter at a time to float32, in which torch computes the step and changes the
    parameter. Then the moments are rounded to the nearest."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - none are used
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= initial_moments(self, parameter)
        tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        own, slope, first, second = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
        assert (own.dtype, first.dtype, second.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        wide_first, wide_second = first.float(), second.float()
        beta1, beta2 = group["betas"]
        adamw(
            [own], [slope], [wide_first], [wide_second], [], [state["step"]], fused=True, amsgrad=False, beta1=beta1,
            beta2=beta2, maximize=False, **{key: group[key] for key in ("lr", "weight_decay", "eps")},
        )  # fmt: skip
        first.copy_(wide_first)
        second.copy_(wide_second)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for `matrices`, and `adamw` for its own parameters.

        B <- momentum B + (1 - momentum) G,  O = orthogonalize((1 - momentum) G + momentum B)
        W <- W - lr weight_decay W - lr 0.2 sqrt(max(rows, columns)) O

    The momentum B is sharded like its matrix. Every rank gathers the whole update of a sharded matrix, so the numbers
    do not depend on the ranks. `state` has the state of both optimizers.

    Args:
        matrices: with two dimensions each.
        adamw: without a step.
    """

    def __init__(
        self, matrices: Sequence[Tensor], adamw: torch.optim.AdamW, *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        self.adamw = adamw
        own: dict[str, Any] = {"params": list(matrices), "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([own, *adamw.param_groups], {})
        self.adamw.state = self.state
        self._matrices = {id(matrix) for matrix in matrices}

    def has(self, parameter: Tensor) -> bool:
        """Whether Muon updates `parameter`."""
        return id(parameter) in self._matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - none are used
        """Take one step of both."""
        self.adamw.step()
        group = self.param_groups[0]
        for matrix in group["params"]:
            if matrix.grad is not None:
                self._update(matrix, group)

    def _update(self, matrix_OI: Tensor, group: dict[str, Any]) -> None:
        gradient_OI, state = matrix_OI.grad, self.state[matrix_OI]
        assert gradient_OI is not None
        if not state:
            state |= initial_moments(self, matrix_OI)
        held_OI = state["momentum_buffer"]
        momentum_OI = held_OI.to(matrix_OI.dtype)  # the same tensor, or a wider one
        momentum_OI.lerp_(gradient_OI, 1 - group["momentum"])
        if momentum_OI is not held_OI:
            held_OI.copy_(momentum_OI)
        update_OI = _orthogonalized(gradient_OI.lerp(momentum_OI, group["momentum"]))
        matrix_OI.mul_(1 - group["lr"] * group["weight_decay"])
        matrix_OI.add_(update_OI, alpha=-group["lr"] * _RMS * math.sqrt(max(matrix_OI.shape)))


def _orthogonalized(update_OI: Tensor) -> Tensor:
    """Return `orthogonalize` of a matrix, sharded or not, with its dtype and sharding. Collective."""
    if not isinstance(update_OI, DTensor):
        return orthogonalize(update_OI).to(update_OI.dtype)
    # On the device of the mesh: an offloaded matrix is on the host, which is too slow.
    whole_OI = orthogonalize(update_OI.full_tensor().to(update_OI.device_mesh.device_type)).to(update_OI.dtype)
    sharded_OI = torch.empty_like(update_OI)
    own, region = local_part(sharded_OI)
    own.copy_(whole_OI[region])
    return sharded_OI


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019) with weight decay on matrices only, or Muon with AdamW."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not isinstance(config, MuonConfig):
        return _adamw(trained, config)
    assert isinstance(model, PreTrainedModel)
    hidden = hidden_matrices(model)
    known = {id(matrix) for matrix in hidden}
    rest = _adamw({name: parameter for name, parameter in trained.items() if id(parameter) not in known}, config)
    return MuonWithAdamW(hidden, rest, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained parameters with two dimensions in the decoder layers, except embeddings and stacked biases."""
    layers = decoder_layers(model)
    tables = {id(one.weight) for layer in layers for one in layer.modules() if isinstance(one, nn.Embedding)}
    return [
        parameter
        for layer in layers
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and _is_matrix(name, parameter)
        and id(parameter) not in tables
    ]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")  # stacked experts have stacked biases


def initial_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's first state of a parameter."""
    is_muon = isinstance(optimizer, MuonWithAdamW)
    is_compact = isinstance(optimizer.adamw if is_muon else optimizer, CompactAdamW)

    def zeros() -> Tensor:
        dtype = torch.bfloat16 if is_compact else parameter.dtype
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)

    if is_muon and optimizer.has(parameter):
        return {"momentum_buffer": zeros()}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def _adamw(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    matrices = [parameter for name, parameter in parameters.items() if _is_matrix(name, parameter)]
    vectors = [parameter for name, parameter in parameters.items() if not _is_matrix(name, parameter)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    kind = CompactAdamW if config.moments_dtype == "bfloat16" else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}  # torch does not compute with tensors of two meshes
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    gradients = [one.grad for group in by_mesh.values() for one in group if one.grad is not None]
    norm = nn.utils.get_total_norm(gradients) if len(by_mesh) <= 1 else _norm_of_shards(gradients)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _norm_of_shards(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of shards of several meshes, in one all-reduce. Collective."""
    shards = [one for one in gradients if isinstance(one, DTensor)]
    assert len(shards) == len(gradients)
    own = nn.utils.get_total_norm([one.to_local() for one in shards])
    square = own.double().square()
    # Experts have one dimension more than all else, whose last dimension has the ranks of one copy.
    mesh = min((one.device_mesh for one in shards), key=lambda mesh: mesh.ndim)
    dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    return square.sqrt().to(own.dtype)


def check_finite(step: int, *, loss: float, grad_norm: float) -> None:
    """Raise TrainingError if loss or gradient norm is NaN or infinite, before the update is applied."""
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
