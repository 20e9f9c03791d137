"""Activation checkpointing, compile and FSDP2 around the layers of a model, in this order."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import DataError
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.decoder import DecoderModel
from holdfast.trainer.models.structure import decoder_layers


def apply_wrappers(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh) -> None:
    """Wrap a model in place, as `config` says. One rank in float32 stays without FSDP.

    Raises:
        DataError: transformers cannot recompute the layers of this model.
    """
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
    if mesh.world_size == 1 and config.compute_dtype == "float32":
        return  # nothing to shard and nothing to cast: FSDP would only copy, for a quarter of a small model's step
    mixed_precision = MixedPrecisionPolicy()
    if config.compute_dtype == "bfloat16":
        # Gradients are summed over ranks in float32: bfloat16 would lose the small ones.
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # With whole parameters on each rank there is nothing to free by resharding, only copies to repeat.
    has_shards = mesh.num_shards > 1
    for layer in layers:
        fully_shard(layer, mesh=mesh.device_mesh, mp_policy=mixed_precision, reshard_after_forward=has_shards)
    # The backward pass begins with the root; and `readout` needs the head to stay.
    fully_shard(model, mesh=mesh.device_mesh, mp_policy=mixed_precision, reshard_after_forward=False)
    # FSDP2 gathers parameters before `forward` alone; `run` needs them, too.
    register_fsdp_forward_method(model, "run")


def reshard(model: nn.Module) -> None:
    """Put all parameters back into shards, as a backward pass does.

    A forward pass without a backward (validation) leaves them whole, and then saving or publishing
    would see tensors that the optimizer does not update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
