"""From a model on the meta device to one that is sharded, has memory and weights, and knows how it is to be used."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import (
    PreTrainedModel,
)

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import DataError, HoldfastError
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.decoder import DecoderModel
from holdfast.trainer.models.initial_weights import Fill
from holdfast.trainer.models.layout import Layout
from holdfast.trainer.models.pretrained import (
    one_line,
)
from holdfast.trainer.models.sharding import apply_wrappers, reshard
from holdfast.trainer.models.structure import takes_positions, use_attention

_log = logging.getLogger("trainer")


def materialize(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh, fill: Fill | None) -> None:
    """Shard `model`, which was built on the meta device, and give it memory; it is in training mode then. Collective.

    Args:
        fill: puts the weights into the transformers model in it; None: they will be loaded from a checkpoint.

    Raises:
        DataError: the model cannot be used in the configured way.
    """
    hf_model = model.hf_model
    apply_wrappers(model, config, mesh)
    model.to_empty(device=mesh.parameter_device)
    # to_empty gave tied parameters memory of their own.
    hf_model.tie_weights()
    _reset_buffers(hf_model)
    # FSDP moves parameters alone to where they are computed with.
    _move_buffers(hf_model, mesh.device)
    _prepare(model, config, mesh)
    model.share_rows(mesh.sequence)
    if fill is not None:
        # Sending the weights of rank 0 to the others asks for one device of all that is filled.
        _move_buffers(hf_model, mesh.parameter_device)
        fill(hf_model)
        _move_buffers(hf_model, mesh.device)
    model.train()


def _move_buffers(hf_model: PreTrainedModel, device: torch.device) -> None:
    for module in hf_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _prepare(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh) -> None:
    """Have the model find out how it is to be used, before it has its weights: that must not depend on them."""
    with torch.no_grad():
        for parameter in model.parameters():
            # to_empty left garbage, of which the comparisons in `prepare` could be NaN.
            parameter.fill_(1.0)
    model.layout = Layout(packs=takes_positions(model.hf_model), attention=config.attention)
    was_training = model.training
    model.eval()
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    # fork_rng: whatever is random in these passes must not move the generators of the run.
    with naming_failures(model, config.name, config.compute_dtype), torch.random.fork_rng(devices=devices):
        model.run(model.prepare)
    reshard(model)
    model.train(was_training)
    use_attention(model.hf_model, model.layout.attention)


@contextmanager
def naming_failures(model: DecoderModel, name: str, dtype: str) -> Iterator[None]:
    """Name the model whose forward pass in the block fails.

    Raises:
        DataError: it failed: the model cannot compute with its config.json in this dtype.
    """
    try:
        yield
    except (HoldfastError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        _log.debug("the forward pass failed", exc_info=True)
        advice = " Try model.dtype = float32." if dtype != "float32" else ""
        raise DataError(
            f"model.name = '{name}': transformers' forward pass of {type(model.hf_model).__name__} fails with this "
            f"config.json in {dtype}. {type(error).__name__}: {one_line(error)}.{advice}"
        ) from error


def _reset_buffers(hf_model: PreTrainedModel) -> None:
    """Compute again the buffers that no checkpoint holds (rotary frequencies): to_empty left garbage.

    Raises:
        DataError: transformers does not say what belongs into one of them, or cannot say it of shards.
    """
    for parameter in hf_model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves these as they are
    for module in hf_model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    buffers = {name: buffer for name, buffer in hf_model.named_buffers() if buffer.is_floating_point()}
    for buffer in buffers.values():
        # NaN marks those that initialize_weights passes over.
        buffer.fill_(math.nan)
    try:
        hf_model.initialize_weights()
    except RuntimeError as error:  # of code that computes with a parameter, of which here is a shard
        raise DataError(
            f"{type(hf_model).__name__} cannot be divided among ranks: transformers' code that initialises it fails "
            f"with shards ({one_line(error)})"
        ) from error
    persistent = hf_model.state_dict().keys()
    if left := [name for name, buffer in buffers.items() if buffer.isnan().any() and name not in persistent]:
        raise DataError(
            f"{type(hf_model).__name__} does not say how to compute its buffer {left[0]}, so it cannot be trained here"
        )
    for name, buffer in buffers.items():
        if name in persistent and buffer.isnan().any():
            buffer.fill_(1.0)  # the weights or a checkpoint fill it
