"""Finding one's way in a transformers model: its decoder, the layers in it, the attention that they look up."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from triad.errors import DataError


def decoder_of(hf_model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that makes hidden states of tokens, without the head.

    Raises:
        DataError: there is none that can be told from the rest.
    """
    inside = [module for module in hf_model.children() if isinstance(module, PreTrainedModel)]
    for found in (hf_model.get_decoder(), hf_model.base_model, *inside):
        if isinstance(found, PreTrainedModel) and found is not hf_model:
            return found
    raise DataError(f"{type(hf_model).__name__} has no decoder apart from its head and cannot be trained here")


def decoder_layers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer layers, the units of sharding, compiling and recomputing."""
    lists = [module for module in decoder_of(hf_model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise DataError(f"{type(hf_model).__name__} has no list of decoder layers and cannot be sharded")
    # The list that holds most: lists inside layers (experts) are parts of it.
    return list(max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters())))


def takes_positions(hf_model: PreTrainedModel) -> bool:
    """Whether the decoder can be told the position of each token."""
    return "position_ids" in inspect.signature(decoder_of(hf_model).forward).parameters


def use_attention(hf_model: nn.Module, name: str) -> None:
    """Have all layers look up the attention implementation `name` from now on."""
    for config in _configs(hf_model):
        config._attn_implementation_internal = name


@contextmanager
def other_attention(hf_model: nn.Module, name: str) -> Iterator[None]:
    """Use another attention implementation, without compiled code, in the block."""
    before = [(config, config._attn_implementation_internal) for config in _configs(hf_model)]
    use_attention(hf_model, name)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


def _configs(hf_model: nn.Module) -> list[PreTrainedConfig]:
    found = (getattr(module, "config", None) for module in hf_model.modules())
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())
