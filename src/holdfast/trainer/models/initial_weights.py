"""The weights that a model begins with, put into its shards.

Each rank reads its own part of every tensor from the safetensors files of `model.name`, so none holds the whole model
and none waits for another. What cannot be read so, and what is drawn at random, rank 0 makes as a whole and broadcasts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import CheckpointError, DataError
from holdfast.trainer.checkpoints.weight_sources import ConvertedSource, SafetensorsSource, Source, local_part
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.lora import base_tensors, initial_tensors, is_adapted
from holdfast.trainer.models.tensor_layout import TensorLayout, weight_files

_log = logging.getLogger("trainer")

Fill = Callable[[PreTrainedModel], None]
"""Fills the tensors of a model that has memory. Collective."""


class _CannotRead(Exception):
    """Why the ranks do not read the files part by part."""


def filler(
    hf_model: PreTrainedModel,
    config: TrainedModelConfig,
    mesh: Mesh,
    *,
    seed: int,
    make_whole: Callable[[], dict[str, Tensor]],
    drawn: Mapping[str, Tensor] | None = None,
) -> Fill:
    """Return what fills `hf_model` with the weights that it begins with. Collective.

    Args:
        hf_model: on the meta device, with its adapters, if it has any.
        seed: of what adapters begin with.
        make_whole: makes all tensors of the model without adapters, by name; called on rank 0, and only if need be.
        drawn: tensors, the same on every rank, that no file has.

    Raises:
        DataError: as `make_whole` does.
    """
    drawn = drawn or {}
    source, reason = None, "they are drawn at random"
    if config.init == "pretrained":
        try:
            source, reason = _open(hf_model, config.name, without=drawn.keys()), ""
        except (_CannotRead, CheckpointError, DataError) as error:
            reason = str(error)
    # One answer for all: on another machine files may be missing.
    is_unread = mesh.max({"is_unread": float(source is None)})["is_unread"]
    if source is not None and not is_unread:
        return lambda model: _fill_from(source, model, drawn, seed=seed)
    if mesh.is_main and mesh.world_size > 1:
        _log.info("rank 0 makes the weights of %s and sends them: %s", config.name, reason or "others cannot read them")
    whole = make_whole() if mesh.is_main else {}
    if mesh.is_main and is_adapted(hf_model):
        whole = initial_tensors(hf_model, whole, seed=seed)
    return lambda model: _broadcast(whole, model)


def _broadcast(whole: dict[str, Tensor], hf_model: PreTrainedModel) -> None:
    """Fill a model with what rank 0 holds in full."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(hf_model, cast(dict[str, Any], whole), options=options)


@torch.no_grad()
def _fill_from(source: Source, hf_model: PreTrainedModel, drawn: Mapping[str, Tensor], *, seed: int) -> None:
    tensors = base_tensors(hf_model)
    source.fill({name: tensor for name, tensor in tensors.items() if name not in drawn})
    given = {tensors[name]: whole for name, whole in drawn.items()}
    if is_adapted(hf_model):
        in_memory = hf_model.state_dict(keep_vars=True)
        # Every rank draws all of them: they are small, and so are the same for any number of ranks.
        given |= {in_memory[name]: whole for name, whole in initial_tensors(hf_model, {}, seed=seed).items()}
    for tensor, whole in given.items():
        local, region = local_part(tensor.detach())
        local.copy_(whole[region])


def _open(hf_model: PreTrainedModel, name: str, *, without: Collection[str]) -> Source:
    """Return the files of `name`, which hold every tensor of the model but `without`.

    Raises:
        _CannotRead, CheckpointError, DataError: they do not, or not so that each rank can take its part.
    """
    files = weight_files(name)
    if not files:
        raise _CannotRead("there is no model.safetensors, nor one index of several such files")
    if (Path(name) / "adapter_config.json").is_file():
        raise _CannotRead("an adapter lies beside them")
    in_files = SafetensorsSource(files)
    source = ConvertedSource(in_files, TensorLayout(hf_model, in_files.found))
    wanted = {key: tensor for key, tensor in base_tensors(hf_model).items() if key not in without}
    for key, tensor in wanted.items():
        found = source.found.get(key)
        if found is None:
            raise _CannotRead(f"{key} is not in them")
        if found.shape != tuple(tensor.shape) or found.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise _CannotRead(f"{key} has another shape or kind of numbers in them")
    # Of tied tensors transformers takes whichever is there, and compares where both are.
    tied = [key for key in hf_model.state_dict() if key in source.found and key not in wanted and key not in without]
    if tied:
        raise _CannotRead(f"{tied[0]} is in them and is tied to another tensor")
    return source
