"""Finding one's way in a transformers model: its decoder, the layers in it, the attention that they look up."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from holdfast.shared.errors import DataError

_OFFSET = 2  # rows of OPT's table, and of those made after it, that stand for no position


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


def last_position(hf_model: PreTrainedModel) -> int | None:
    """Return how many positions a model has whose positions are rows of a table, learned or computed at its start."""
    limit = getattr(hf_model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    words = hf_model.get_input_embeddings()
    embeddings = [one for one in hf_model.modules() if isinstance(one, nn.Embedding) and one is not words]
    tables = [
        *(one.num_embeddings for one in embeddings),
        *(one.shape[0] for one in hf_model.buffers() if one.ndim == 2),
    ]
    return limit if any(limit <= rows <= limit + _OFFSET for rows in tables) else None


def pair_cost(hf_model: PreTrainedModel) -> float:
    """Return the cost of attention between two tokens of a sample, in costs of one token outside of attention.

    By floating-point operations: 6 a parameter and token, and for every pair of tokens 12 times layers and hidden size,
    of which causal attention needs half (Chowdhery et al. 2022, "PaLM", appendix B). An estimate: all heads together
    count as wide as the hidden size, windows as if tokens saw all before them, and of experts all as if a token went
    through them. 0 where config.json does not say how large attention is.
    """
    config = hf_model.config.get_text_config()
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(width, int) or not isinstance(layers, int):
        return 0.0
    parameters = sum(parameter.numel() for parameter in hf_model.parameters())
    if hf_model.get_output_embeddings() is None or not config.tie_word_embeddings:
        parameters -= sum(one.numel() for one in hf_model.get_input_embeddings().parameters())  # only looked up
    return layers * width / parameters


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
