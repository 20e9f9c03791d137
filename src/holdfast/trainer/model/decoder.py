"""A transformers model with samples in rows: the base of policy, reward model and critic, and its sharding.

`apply_wrappers` applies activation checkpointing, compile and FSDP2 to the layers, in this order.

Shape legend: B rows, L tokens of a row, N predicted tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from transformers import PreTrainedModel

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.data.packing import MicroBatch, PackedIndex
from holdfast.trainer.mesh import Mesh, SequenceGroup
from holdfast.trainer.model.context_parallel import RowSlice, reason_against
from holdfast.trainer.model.expert_parallel import divide_experts, shard_experts
from holdfast.trainer.model.packing_check import PACKED, find_layout
from holdfast.trainer.model.structure import decoder_layers, decoder_of, longest_sample, pair_cost


def freeze(model: nn.Module) -> None:
    """Take a model out of training, without dropout."""
    model.eval()
    model.requires_grad_(False)


T = TypeVar("T")


class DecoderModel(nn.Module):
    """A transformers model and how samples are placed in its rows: the base of `Policy` and `ScalarModel`.

    Attributes:
        layout: whether samples can share a row, what they cost there, and the attention to use.
        longest_sample: how many tokens a sample may have; None: any number.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.layout = PACKED
        self.longest_sample = longest_sample(hf_model)
        self._sequence: SequenceGroup | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, which sees whole parameters as `forward` does. Collective."""
        return function()

    def prepare(self) -> None:
        """Find out the layout. Called once, inside `run`, while all weights are 1; collective."""
        limit = self.longest_sample
        found = find_layout(self.hf_model, self._all_hidden_states, self.layout.attention, longest=limit)
        shares = found.packs and found.attention == "packed"
        self.layout = replace(found, pair_cost=pair_cost(self.hf_model), shares=shares)

    def take_over(self, other: DecoderModel) -> None:
        """Take over what `prepare` found out with another model of the same kind."""
        self.layout = other.layout

    def share_rows(self, ranks: SequenceGroup | None) -> None:
        """Have ranks share the rows of every pass, after `prepare`. Raise DataError if the model cannot."""
        if ranks is None:
            return
        reason = self.layout.reason
        if not reason and self.layout.attention != "packed":
            reason = f"model.attention = {self.layout.attention}, and only packed attention is computed so"
        for heads, key_heads in sorted(self.layout.heads):
            reason = reason or reason_against(heads, key_heads, ranks.size)
        if reason:
            raise DataError(
                f"parallel.sequence_parallel = {ranks.size}: {type(self.hf_model).__name__} cannot be computed in "
                f"slices of its rows: {reason}. Set parallel.sequence_parallel = 1 or another number"
            )
        self._sequence = ranks

    def check_ids(self, micro: MicroBatch) -> None:
        """Refuse tokens that the model does not have: on a GPU nobody could say later what failed. Raise DataError."""
        rows = next(self.hf_model.get_input_embeddings().parameters()).shape[0]
        if micro.largest_id >= rows:
            raise DataError(
                f"a sample has the token {micro.largest_id}, and {type(self.hf_model).__name__} has {rows} tokens, "
                "from 0 on: name the model's own tokenizer (model.tokenizer), or a model with room for its tokens"
            )

    def row_slice(self, rows_BL: Tensor) -> RowSlice | None:
        """Return the slice of the rows that this rank computes; None: whole rows."""
        return None if self._sequence is None else RowSlice(self._sequence, rows_BL.shape[1])

    def _all_hidden_states(self, input_ids_1L: Tensor) -> Tensor:
        positions_1L = torch.arange(input_ids_1L.shape[1], device=input_ids_1L.device)[None]
        index = PackedIndex.from_lengths([input_ids_1L.shape[1]], device=input_ids_1L.device)
        return self.hidden_states(
            input_ids_1L, positions_1L, positions_1L[0], packed_index=index if self.layout.packs else None
        )

    def hidden_states(
        self, input_ids_BL: Tensor, position_ids_BL: Tensor, index_N: Tensor, *, packed_index: PackedIndex | None
    ) -> Tensor:
        """Return the decoder's hidden states (N, H) at places in the flattened (B * L) rows.

        If ranks share rows, only places in this rank's slice count: see `row_slice`. `packed_index`: layout of samples
        if the single row is packed. Raise DataError if a sample is longer than `longest_sample`."""
        longest = input_ids_BL.shape[1] if packed_index is None else packed_index.max_len
        if self.longest_sample is not None and longest > self.longest_sample:
            raise DataError(
                f"a sample has {longest} tokens, and {type(self.hf_model).__name__} has positions for "
                f"{self.longest_sample} (max_position_embeddings, or original_max_position_embeddings of its rotary "
                "embeddings, in its config.json): shorten it"
            )
        kwargs: dict[str, object] = {}
        if (row := self.row_slice(input_ids_BL)) is not None:
            kwargs["row_slice"] = row
            index_N = row.places(index_N)
            input_ids_BL, position_ids_BL = row.of(input_ids_BL), row.of(position_ids_BL)
        decoder = decoder_of(self.hf_model)
        if self.layout.packs:
            kwargs["position_ids"] = position_ids_BL
        if packed_index is not None:
            assert self.layout.packs, f"{type(self.hf_model).__name__} cannot be packed: {self.layout.reason}"
            if self.layout.attention == "packed":
                kwargs["packed_index"] = packed_index
            else:
                borders, longest = packed_index.cu_seqlens, packed_index.max_len
                kwargs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
                kwargs |= {"max_length_q": longest, "max_length_k": longest}
        output = decoder(input_ids=input_ids_BL, use_cache=False, **kwargs)
        return output.last_hidden_state.flatten(0, 1).index_select(0, index_N)


def apply_wrappers(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh) -> None:
    """Wrap a model in place. Raise DataError if transformers cannot recompute its layers."""
    hf_model = model.hf_model
    layers = decoder_layers(hf_model)
    if config.activation_checkpointing:
        if not hf_model.supports_gradient_checkpointing:
            raise DataError(
                "model.activation_checkpointing: transformers cannot recompute the layers of "
                f"{type(hf_model).__name__}; turn it off with --no-model.activation-checkpointing"
            )
        hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        for layer in layers:
            layer.compile()
    if mesh.world_size == 1 and config.compute_dtype == "float32" and not mesh.cpu_offload:
        return  # FSDP would only copy, for a quarter of a small model's step
    mixed_precision = fsdp.MixedPrecisionPolicy()
    if config.compute_dtype == "bfloat16":
        # Gradients are summed over ranks in float32: bfloat16 would lose the small ones.
        mixed_precision = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A rank with whole parameters frees copies in the compute dtype. The backward pass makes them again.
    frees = mesh.num_shards > 1 or mesh.cpu_offload or config.activation_checkpointing
    shard = partial(
        fsdp.fully_shard, mesh=mesh.device_mesh, mp_policy=mixed_precision, offload_policy=_offload_policy(mesh)
    )
    if mesh.expert_mesh is not None:
        for experts in divide_experts(hf_model, mesh.expert_mesh, name=config.name):
            shard_experts(experts, mesh.expert_mesh, mp_policy=mixed_precision)
    for layer in layers:
        shard(layer, reshard_after_forward=frees)
    embedding = hf_model.get_input_embeddings()
    # An offloaded one is on the host until it computes, and `find_layout` asks it for the device.
    if not mesh.cpu_offload and not _is_tied(embedding, hf_model):
        unit = shard(embedding, reshard_after_forward=frees)
        unit.set_unshard_in_backward(False)  # its gradient needs only the tokens
    # The backward pass begins with the root, and `readout` needs the head.
    shard(model, reshard_after_forward=False)
    # FSDP2 gathers parameters before `forward` only; `run` needs them, too.
    fsdp.register_fsdp_forward_method(model, "run")


def _is_tied(embedding: nn.Module, model: nn.Module) -> bool:
    """Whether other modules compute with parameters of the embedding."""
    own = {id(parameter) for parameter in embedding.parameters()}
    uses = [parameter for _, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own]
    return len(uses) > len(own)


def rows_of_update(model: nn.Module, rows: Sequence[T]) -> Iterator[T]:
    """Yield the micro-batches of an update. Replicas of the model add up their gradients with the last one only."""
    for place, row in enumerate(rows, start=1):
        if isinstance(model, fsdp.FSDPModule):
            model.set_requires_all_reduce(place == len(rows))
        yield row


def _offload_policy(mesh: Mesh) -> fsdp.OffloadPolicy:
    if not mesh.cpu_offload:
        return fsdp.OffloadPolicy()
    # Copies to a GPU only overlap from pinned memory.
    return fsdp.CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")


def reshard(model: nn.Module) -> None:
    """Put all parameters back into shards, as a backward pass does.

    After a forward pass without backward, saving would see tensors that the optimizer does not update."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
