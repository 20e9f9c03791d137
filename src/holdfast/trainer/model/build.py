"""Builds transformers models from a directory or hub name: config, empty model, sharding, memory, weights.

A model starts on the meta device; `materialize` gives a sharded model its memory and weights. Each rank reads its own
part of every tensor from the safetensors files of `model.name`. So no rank holds the whole model or waits for another.
Rank 0 makes tensors that cannot be read this way, or that are drawn at random, as a whole, and broadcasts them.

An error is reported in one line, since transformers' own errors come from anywhere in its code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.configuration_utils import PreTrainedConfig

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import CheckpointError, DataError, HoldfastError, RankLost
from holdfast.run.inputs import check_weights_path
from holdfast.trainer.checkpoint.init_from import ConvertedSource, SafetensorsSource, Source, local_part
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.decoder import DecoderModel
from holdfast.trainer.model.fsdp import apply_wrappers, reshard
from holdfast.trainer.model.lora import adapter_parameters, initial_tensors, is_adapted
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.structure import base_tensors, takes_positions, use_attention
from holdfast.trainer.model.tensor_names import TensorLayout, weight_files

_log = logging.getLogger("trainer")


class Trained(Protocol):
    """A module around a transformers model whose parameters and persistent buffers are its state."""

    hf_model: PreTrainedModel


def trained_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer changes, by their names in `trained_tensors`."""
    if is_adapted(hf_model):
        return adapter_parameters(hf_model)
    return {name: parameter for name, parameter in hf_model.named_parameters() if parameter.requires_grad}


_MOST_CHARACTERS = 300  # of another library's message


Kind = type[AutoModelForCausalLM | AutoModelForSequenceClassification]


def load_model_config(name: str) -> PreTrainedConfig:
    """Return the transformers config of a local directory or hub model.

    Raises:
        DataError: there is none, it contradicts itself, or its weights are quantised.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # unset, it would ask at a terminal
    except Exception as error:
        _log.debug("the model config was not loaded", exc_info=True)
        if any(words in str(error) for words in ("trust_remote_code", "does not recognize this architecture")):
            raise DataError(
                f"model.name = '{name}': transformers {transformers.__version__} has no such kind of model (model_type "
                "in its config.json), and code that a model brings along is not run. docs/models.md lists the kinds "
                "that can be trained."
            ) from error
        raise DataError(f"model.name = '{name}': no model config could be loaded. {one_line(error)}") from error
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise DataError(
            f"model.name = '{name}': its weights are quantised ({getattr(method, 'value', method)}, see "
            "quantization_config in its config.json), and only weights in float32, bfloat16 or float16 can be trained: "
            "give the model that it was made from"
        )
    return config


def build_hf_model(kind: Kind, config: TrainedModelConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Return the transformers model of a config, with the weights that torch's default device and generator make.

    Some kinds of models choose their attention when they are built. `packed` is not among their choices: it comes
    in afterwards, where the layers can take it.

    Raises:
        DataError: transformers has no such model, or it cannot be built with `model.attention`.
    """
    attention = "eager" if config.attention == "packed" else config.attention
    try:
        return kind.from_config(model_config, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:
        _log.debug("the model was not built", exc_info=True)
        what = "sequence classification" if kind is AutoModelForSequenceClassification else "a causal language model"
        raise DataError(
            f"model.name = '{config.name}': transformers cannot build {what} of type {model_config.model_type} with "
            f"{attention} attention. {type(error).__name__}: {one_line(error)}"
        ) from error


def is_classifier(model_config: PreTrainedConfig) -> bool:
    """Return whether a directory holds a model with a head that scores sequences instead of predicting tokens."""
    return any(name.endswith("ForSequenceClassification") for name in model_config.architectures or [])


def initial_weights(
    config: TrainedModelConfig,
    model_config: PreTrainedConfig,
    seed: int,
    *,
    kind: Kind = AutoModelForCausalLM,
) -> dict[str, Tensor]:
    """Return the weights that a model starts with by name, as its directory or the seed gives them.

    Args:
        kind: which of the models with this config.

    Raises:
        DataError: the directory has no weights, or not all of them.
    """
    if config.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = build_hf_model(kind, config, model_config)
        return trained_tensors(fresh)
    check_weights_path(config.name)
    try:
        answer = kind.from_pretrained(
            config.name,
            config=model_config,
            dtype=torch.float32,
            attn_implementation="eager",  # which every model has; nothing is computed
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with its name
        )
        loaded, findings = cast(tuple[PreTrainedModel, dict[str, Any]], answer)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _log.debug("the weights were not loaded", exc_info=True)
        raise DataError(
            f"model.name = '{config.name}': the weights could not be loaded. {type(error).__name__}: {one_line(error)}"
        ) from error
    if mismatched := sorted(findings["mismatched_keys"]):
        tensor, in_files, wanted = mismatched[0]
        raise DataError(
            f"model.name = '{config.name}': the weights could not be loaded. '{tensor}' has shape {list(in_files)} in "
            f"its files and {list(wanted)} by its config.json ({len(mismatched)} such tensors)"
        )
    if missing := sorted(findings["missing_keys"]):  # transformers itself fills these with random numbers
        raise DataError(f"model.name = '{config.name}': the weights lack {len(missing)} tensors, such as {missing[0]}")
    return trained_tensors(loaded)


def trained_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return what checkpoints hold of a model: parameters and persistent buffers by name, tied ones once.

    Of tied names the first wins. Of a model with adapters it is the adapters alone.
    """
    if is_adapted(hf_model):
        return {name: factor.detach() for name, factor in adapter_parameters(hf_model).items()}
    return base_tensors(hf_model)


def one_line(error: Exception) -> str:
    """Return the message of another library in one line, its beginning where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


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
        RankLost: a collective of it failed, as another rank has ended.
        DataError: it failed: the model cannot compute with its config.json in this dtype.
    """
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
