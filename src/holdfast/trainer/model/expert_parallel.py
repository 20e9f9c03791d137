"""Expert parallelism: each rank holds some of the experts of every layer, and tokens travel to their experts.

transformers says which parameters are experts (`base_model_ep_plan`), and exchanges the tokens. FSDP2 shards the
experts of a rank over the ranks that hold the same experts.

Shape legend: T tokens of a rank, K experts of a token, H hidden size, P = T * K pairs of token and expert.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    EpDispatchExpertsParallel,
    apply_expert_parallelism,
    replace_layer_number_by_wildcard,
)

from holdfast.errors import DataError

_SHARDED, _DISPATCHED = "grouped_gemm", "ep_dispatch_experts"


class StableDispatch(EpDispatchExpertsParallel):
    """transformers' exchange of tokens. The tokens of an expert keep their order, so sums have the same bits again."""

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, num_local_experts: int, ep_group: ProcessGroup, ep_size: int
    ) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
        experts_P = top_k_index.reshape(-1)
        order_P = torch.argsort(experts_P, stable=True)
        sent_PH = hidden_states[order_P // top_k_index.shape[-1]]
        sent_counts = torch.zeros(ep_size * num_local_experts, dtype=torch.long, device=experts_P.device)
        sent_counts = sent_counts.scatter_add_(0, experts_P, torch.ones_like(experts_P)).view(ep_size, -1)
        counts = torch.empty_like(sent_counts)
        torch.distributed.all_to_all_single(counts, sent_counts, group=ep_group)
        sent, received = torch.stack([sent_counts.sum(dim=1), counts.sum(dim=1)]).tolist()
        tokens = all_to_all_single(sent_PH, received, sent, ep_group)
        ids = torch.arange(num_local_experts, device=experts_P.device).repeat(ep_size)
        return tokens, ids.repeat_interleave(counts.flatten(), output_size=sum(received)), order_P, sent, received


def _holders(hf_model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that hold experts which ranks can divide, by name."""
    plan = hf_model.ep_plan
    if set(plan.values()) != {_SHARDED, _DISPATCHED}:
        return {}
    modules = hf_model.named_modules()
    return {key: one for key, one in modules if plan.get(replace_layer_number_by_wildcard(key)) == _DISPATCHED}


def number_of_experts(hf_model: PreTrainedModel) -> int:
    """Return how many experts of a layer ranks can divide; 0: none."""
    return gcd(*(len(parameter) for holder in _holders(hf_model).values() for parameter in holder.parameters()))


def divide_experts(hf_model: PreTrainedModel, mesh: DeviceMesh, *, name: str) -> list[nn.Module]:
    """Divide the experts of a model over dimension `ep` of `mesh`; return the modules that hold experts. `name`:
    `model.name`. Raise DataError if transformers has no plan for such models, or the ranks do not divide the number of
    experts."""
    ranks, holders = mesh["ep"].size(), _holders(hf_model)
    where = f"parallel.expert_parallel = {ranks}: "
    if not holders:
        raise DataError(
            f"{where}transformers cannot send tokens of {type(hf_model).__name__} (model.name = '{name}') to experts "
            "on other ranks. Set parallel.expert_parallel = 1, which shards all parameters alike"
        )
    for key, module in holders.items():
        for parameter in module.parameters():
            if len(parameter) % ranks:
                raise DataError(
                    f"{where}it does not divide the {len(parameter)} experts of {key} (model.name = '{name}'): set "
                    "parallel.expert_parallel to a divisor"
                )
    ALL_PARALLEL_STYLES[_DISPATCHED] = StableDispatch()
    apply_expert_parallelism(hf_model, mesh["ep"], None, hf_model.ep_plan)  # pyright: ignore[reportArgumentType] - no mesh of tensor parallelism
    for key, module in holders.items():
        for own, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                raise DataError(f"{where}transformers does not say how to divide {key}.{own} (model.name = '{name}')")
    return list(holders.values())


def shard_experts(experts: nn.Module, mesh: DeviceMesh, *, mp_policy: MixedPrecisionPolicy) -> None:
    """Shard the experts of this rank over the ranks that hold the same experts."""
    assert mesh.mesh_dim_names is not None
    sharded = mesh[mesh.mesh_dim_names[:-1]]
    unit: Any = fully_shard(experts, mesh=sharded, mp_policy=mp_policy)
    # An expert sees the tokens of all ranks, and gradients are averaged over all ranks.
    unit.set_gradient_divide_factor(float(mesh.size()))
    # gloo only sums. A group of one rank sends nothing, and would divide twice.
    unit.set_force_sum_reduction_for_comms(mesh.device_type != "cuda" and sharded.size(-1) > 1)
