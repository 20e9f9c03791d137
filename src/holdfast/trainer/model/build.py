"""Builds transformers models from a directory or hub name: config, empty model, sharding, memory, weights.

A model starts on the meta device; `materialize` gives a sharded model its memory and weights. Each rank reads its own
part of every tensor from the safetensors files of `model.name`. No rank holds the whole model or waits for another.
Rank 0 draws random weights as a whole, and broadcasts them.

Errors of transformers, which come from anywhere in its code, become one line.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import CheckpointError, DataError, HoldfastError, RankLost
from holdfast.run.inputs import check_weights_path
from holdfast.trainer.checkpoint import init_from
from holdfast.trainer.mesh import Mesh, RankGroup
from holdfast.trainer.model.decoder import DecoderModel, apply_wrappers, reshard
from holdfast.trainer.model.lora import adapter_parameters, initial_tensors, is_adapted
from holdfast.trainer.model.model_config import load_model_config, one_line
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.structure import base_tensors, buffer_frozen, takes_positions, use_attention
from holdfast.trainer.model.tensor_names import TensorLayout, weight_files

_log = logging.getLogger("trainer")


def trained_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer updates, by their names in `trained_tensors`."""
    if is_adapted(hf_model):
        return adapter_parameters(hf_model)
    return {name: parameter for name, parameter in hf_model.named_parameters() if parameter.requires_grad}


Kind = type[AutoModelForCausalLM | AutoModelForSequenceClassification]


def build_hf_model(kind: Kind, config: TrainedModelConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Return the transformers model of a config, on torch's default device.

    `packed` attention is set later: some models choose between other attentions when they are built. Raise DataError if
    transformers does not have the model, or cannot build the model with `model.attention`."""
    attention = "eager" if config.attention == "packed" else config.attention
    try:
        hf_model = kind.from_config(model_config, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:
        _log.debug("the model was not built", exc_info=True)
        what = "sequence classification" if kind is AutoModelForSequenceClassification else "a causal language model"
        raise DataError(
            f"model.name = '{config.name}': transformers cannot build {what} of type {model_config.model_type} with "
            f"{attention} attention. {type(error).__name__}: {one_line(error)}"
        ) from error
    buffer_frozen(hf_model)
    return hf_model


def trained_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model in checkpoints: parameters and persistent buffers, or only its adapters.

    A tied tensor has its first name."""
    if is_adapted(hf_model):
        return {name: factor.detach() for name, factor in adapter_parameters(hf_model).items()}
    return base_tensors(hf_model)


Fill = Callable[[PreTrainedModel], None]
"""Fills the tensors of a model that has memory. Collective."""


def filler(
    hf_model: PreTrainedModel, config: TrainedModelConfig, *, seed: int, drawn: Mapping[str, Tensor] | None = None
) -> Fill:
    """Return what fills `hf_model` with the weights that it begins with. Collective.

    Args:
        hf_model: on the meta device, with its adapters, if it has any.
        seed: of random weights, and of new adapters.
        drawn: tensors, the same on every rank, that no file has.

    Raise DataError if the weights cannot be read, or another model's.
    """
    drawn = drawn or {}
    with RankGroup() as ranks:
        if config.init == "random":
            whole = ranks.on_main(lambda: _random_weights(hf_model, config, drawn, seed=seed), error=DataError)
            return lambda model: _broadcast(whole or {}, model)
        read = ranks.together(lambda: open_weights(hf_model, config.name, without=drawn.keys()), error=DataError)
    return lambda model: _fill(model, read, drawn, seed=seed)


def _random_weights(
    hf_model: PreTrainedModel, config: TrainedModelConfig, drawn: Mapping[str, Tensor], *, seed: int
) -> dict[str, Tensor]:
    """Return every tensor of `hf_model` as transformers draws it for a language model from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = build_hf_model(AutoModelForCausalLM, config, load_model_config(config.name))
    source = base_tensors(fresh) | dict(drawn)
    names = base_tensors(hf_model)
    if missing := [name for name in names if name not in source]:
        raise DataError(f"model.name = '{config.name}': the language model lacks {missing[0]}, which scoring needs")
    whole = {name: source[name] for name in names}
    return initial_tensors(hf_model, whole, seed=seed) if is_adapted(hf_model) else whole


def _broadcast(whole: dict[str, Tensor], hf_model: PreTrainedModel) -> None:
    """Fill a model with the whole tensors of rank 0."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(hf_model, cast(dict[str, Any], whole), options=options)


@torch.no_grad()
def _fill(
    hf_model: PreTrainedModel, read: Callable[[Mapping[str, Tensor]], None], drawn: Mapping[str, Tensor], *, seed: int
) -> None:
    tensors = base_tensors(hf_model)
    read({name: tensor for name, tensor in tensors.items() if name not in drawn})
    given = {tensors[name]: whole for name, whole in drawn.items()}
    if is_adapted(hf_model):
        in_memory = hf_model.state_dict(keep_vars=True)
        # Every rank draws all adapters, which are small: their values do not depend on the number of ranks.
        given |= {in_memory[name]: whole for name, whole in initial_tensors(hf_model, {}, seed=seed).items()}
    for tensor, whole in given.items():
        local, region = init_from.local_part(tensor.detach())
        local.copy_(whole[region])


def open_weights(
    hf_model: PreTrainedModel, name: str, *, without: Collection[str] = ()
) -> Callable[[Mapping[str, Tensor]], None]:
    """Return a function that fills tensors of `hf_model` by name; each rank reads its part of the files of `name`.

    Args:
        hf_model: its names, shapes and config count; it may be on the meta device.
        without: tensors that need not be in the files.

    Raise DataError if there are no safetensors files, they are damaged, or belong to another model.
    """
    check_weights_path(name)
    where = f"model.name = '{name}'"
    files = weight_files(name)
    if not files:
        raise DataError(f"{where} has neither model.safetensors nor an index of several such files")
    if (Path(name) / "adapter_config.json").is_file():
        raise DataError(f"{where} holds both a model and adapter_config.json: move away what is not meant")
    try:
        in_files = init_from.SafetensorsSource(files)
        source = init_from.ConvertedSource(in_files, TensorLayout(hf_model, in_files.found))
        names = _names_in_source(hf_model, source, where, without)
    except CheckpointError as error:
        raise DataError(f"{where}: {error}") from error
    return lambda tensors: source.fill({names[own]: tensor for own, tensor in tensors.items()})


def _names_in_source(
    hf_model: PreTrainedModel, source: init_from.Source, where: str, without: Collection[str]
) -> dict[str, str]:
    """Return own name -> name in the source. The files may hold any of several tied tensors, or all of equal value."""
    ties: dict[int, list[str]] = {}
    for name, parameter in hf_model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    tied = {names[0]: names for names in ties.values()}
    wanted = {name: tensor for name, tensor in base_tensors(hf_model).items() if name not in without}
    names: dict[str, str] = {}
    for own in wanted:
        found = [name for name in tied.get(own, [own]) if name in source.found] or [own]
        names[own] = found[0]
        if any(not init_from.are_equal(source, found[0], copy) for copy in found[1:]):
            raise DataError(
                f"{where}: {' and '.join(found)} differ in its files, and its config.json ties them: set "
                "tie_word_embeddings to false there"
            )
    if missing := [own for own, name in names.items() if name not in source.found]:
        raise DataError(f"{where}: the weights lack {len(missing)} tensors, such as {missing[0]}")
    init_from.check_shapes(wanted, {own: source.found[name] for own, name in names.items()}, "what its files hold")
    return names


def materialize(
    model: DecoderModel, config: TrainedModelConfig, mesh: Mesh, fill: Fill | None, *, like: DecoderModel | None = None
) -> None:
    """Shard a model from the meta device, give it memory, and fill in weights, if not None. Collective. `like`: a model
    of the same kind, whose layout is taken over; None: the model finds it out."""
    hf_model = model.hf_model
    apply_wrappers(model, config, mesh)
    model.to_empty(device=mesh.parameter_device)
    # to_empty gave tied parameters memory of their own.
    hf_model.tie_weights()
    _reset_buffers(hf_model)
    # FSDP only moves parameters to the device that computes.
    _move_buffers(hf_model, mesh.device)
    if like is None:
        _prepare(model, config, mesh)
    else:
        model.take_over(like)
    use_attention(hf_model, model.layout.attention)
    model.share_rows(mesh.sequence)
    if fill is not None:
        # The broadcast needs all tensors on one device.
        _move_buffers(hf_model, mesh.parameter_device)
        fill(hf_model)
        _move_buffers(hf_model, mesh.device)
    model.train()


def _move_buffers(hf_model: PreTrainedModel, device: torch.device) -> None:
    for module in hf_model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _prepare(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh) -> None:
    """Have the model find out its layout, before it has weights: the layout must not depend on them."""
    with torch.no_grad():
        for parameter in model.parameters():
            # to_empty left garbage, perhaps NaN.
            parameter.fill_(1.0)
    model.layout = Layout(packs=takes_positions(model.hf_model), attention=config.attention)
    was_training = model.training
    model.eval()
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with naming_failures(model, config.name, config.compute_dtype), torch.random.fork_rng(devices=devices):
        model.run(model.prepare)
    reshard(model)
    model.train(was_training)


@contextmanager
def naming_failures(model: DecoderModel, name: str, dtype: str) -> Iterator[None]:
    """Raise DataError that names the model, or RankLost, if its forward pass in the block fails."""
    try:
        yield
    except (HoldfastError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error):  # gloo has no type of its own
            raise RankLost(f"another rank of the trainer ended during a forward pass: {one_line(error)}") from error
        _log.debug("the forward pass failed", exc_info=True)
        advice = " Try model.dtype = float32." if dtype != "float32" else ""
        raise DataError(
            f"model.name = '{name}': transformers' forward pass of {type(model.hf_model).__name__} fails with this "
            f"config.json in {dtype}. {type(error).__name__}: {one_line(error)}.{advice}"
        ) from error


def _reset_buffers(hf_model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies. Raise DataError if that fails."""
    for parameter in hf_model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers skips these
    for module in hf_model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    buffers = {name: buffer for name, buffer in hf_model.named_buffers() if buffer.is_floating_point()}
    for buffer in buffers.values():
        # NaN marks buffers that initialize_weights skips.
        buffer.fill_(math.nan)
    try:
        hf_model.initialize_weights()
    except RuntimeError as error:  # computes with a parameter, which is a shard here
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
            buffer.fill_(1.0)  # weights or a checkpoint fill it
