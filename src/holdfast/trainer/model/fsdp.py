"""Activation checkpointing, compile and FSDP2 around the layers of a model, in this order."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.decoder import DecoderModel
from holdfast.trainer.model.structure import decoder_layers


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
    mixed_precision = MixedPrecisionPolicy()
    if config.compute_dtype == "bfloat16":
        # Gradients are summed over ranks in float32: bfloat16 would lose the small ones.
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Resharding frees nothing if each rank has whole parameters on its device.
    frees = mesh.num_shards > 1 or mesh.cpu_offload
    shard = partial(fully_shard, mesh=mesh.device_mesh, mp_policy=mixed_precision, offload_policy=_offload_policy(mesh))
    for layer in layers:
        shard(layer, reshard_after_forward=frees)
    # The backward pass begins with the root, and `readout` needs the head.
    shard(model, reshard_after_forward=False)
    # FSDP2 gathers parameters before `forward` only; `run` needs them, too.
    register_fsdp_forward_method(model, "run")


def _offload_policy(mesh: Mesh) -> OffloadPolicy:
    if not mesh.cpu_offload:
        return OffloadPolicy()
    # Copies to a GPU only overlap from pinned memory.
    return CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")


def reshard(model: nn.Module) -> None:
    """Put all parameters back into shards, as a backward pass does.

    After a forward pass without backward, saving would see tensors that the optimizer does not update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
