"""Finds the parts of a transformers model: decoder, layers, attention, head and rotary embeddings.

Most heads are a matrix, perhaps with a bias and a soft cap; `token_logprobs` computes these. Other heads scale or cap
under names of their own. So the model's own forward decides, on hidden states given in place of its decoder's output.
If `token_logprobs` would compute other logits, the model's own logits are used, also in chunks.

Two kinds of rotary embeddings change their frequencies for samples longer than the training length: `longrope` (Ding et
al. 2024, https://arxiv.org/abs/2402.13753) and `dynamic` NTK scaling. transformers uses the largest position of a whole
batch, and `dynamic` also earlier batches. So a sample would depend on its neighbours in a row, and would change after a
resume. `rotate_by_sample` gives each sample the frequencies that it has alone in a fresh model.

Shape legend: B rows, L tokens of a row, C tokens of a chunk, H hidden size, V vocabulary, D rotated numbers of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from holdfast.errors import DataError

BASE_LAYER = ".base_layer."
"""How peft names the layer that an adapter stands beside; `FACTOR`: the adapter's own tensors."""

FACTOR = ".lora_"

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


_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}  # relative; half a unit in the last place is 2^-9


class _Given:
    """The output of a decoder that was given: hidden states, and None for all else."""

    def __init__(self, hidden_BLH: Tensor) -> None:
        self.last_hidden_state = hidden_BLH

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(hf_model: PreTrainedModel, hidden_CH: Tensor) -> Tensor:
    """Return the logits (C, V) that the model's own forward makes of hidden states."""
    decoders = list({id(module): module for module in (hf_model.base_model, decoder_of(hf_model))}.values())
    decoders = [module for module in decoders if module is not hf_model]
    ids_1C = torch.zeros(1, hidden_CH.shape[0], dtype=torch.long, device=hidden_CH.device)
    with _giving(decoders, _Given(hidden_CH[None])):
        return hf_model(input_ids=ids_1C, use_cache=False).logits[0]


def compute_in_float32(head: nn.Module) -> None:
    """Have an output embedding multiply in float32, whatever the dtype of its weights and of hidden states.

    Scaling and caps of the model's own, which come behind it, are in float32 then, too.
    """

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.get_parameter("weight").float(), getattr(head, "bias", None)
        return nn.functional.linear(hidden.float(), weight, None if bias is None else bias.float())

    head.forward = forward


@contextmanager
def _giving(modules: list[nn.Module], output: _Given) -> Iterator[None]:
    """Have the modules return `output`, whatever they are called with."""
    for module in modules:
        module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def has_plain_head(hf_model: PreTrainedModel, softcap: float | None) -> bool:
    """Whether the logits are the output embedding times the hidden states, capped by `softcap`, and nothing else.

    The weights of the head must all be 1, so that they cannot hide a difference.
    """
    head = hf_model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        return False
    weight_VH = head.weight
    values_C = torch.tensor([0.0, 1.0, -3.0, 8.0, 40.0], device=weight_VH.device, dtype=weight_VH.dtype)
    hidden_CH = torch.zeros(len(values_C), weight_VH.shape[1], device=weight_VH.device, dtype=weight_VH.dtype)
    hidden_CH[:, 0] = values_C
    logits_CV = nn.functional.linear(hidden_CH, weight_VH, getattr(head, "bias", None)).float()
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    own_CV = own_logits(hf_model, hidden_CH).float()
    rounding = _ROUNDING[weight_VH.dtype]
    return own_CV.shape == logits_CV.shape and torch.allclose(own_CV, logits_CV, rtol=rounding, atol=rounding)


def rotate_by_sample(hf_model: nn.Module) -> bool:
    """Have rotary embeddings go by the length of each sample; return whether any of the model depends on it."""
    found = [module for module in hf_model.modules() if _kinds_by_length(module)]
    for module in found:
        module.forward = partial(_by_sample, module, module.forward)
    return bool(found)


def original_lengths(config: PreTrainedConfig) -> list[int]:
    """Return how long samples may be before a config's rotary frequencies change, where it says so."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = [
        one.get("original_max_position_embeddings")
        for one in (parameters, *parameters.values())
        if isinstance(one, dict)
    ]
    return [length for length in found if isinstance(length, int)]


def _kinds_by_length(module: nn.Module) -> dict[str | None, str]:
    """Return the kinds of frequencies that depend on the length, by type of layer; None where all have one kind."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {
        layer: kind
        for layer, kind in kinds.items()
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    }


def _by_sample(
    module: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return what `forward` gives for each sample alone; transformers' interface of rotary embeddings.

    Args:
        position_ids: (B, L) within each sample.
    """
    lengths_BL = _sample_lengths(position_ids)
    first = torch.zeros_like(position_ids[:1, :1])
    made: list[Tensor] = []
    is_tuple = True
    for longest in _classes(module, lengths_BL):
        forward(x, first, *args, **kwargs)  # one token: forgets what longer samples before set
        found = forward(x, position_ids.clamp(max=longest - 1), *args, **kwargs)
        is_tuple = isinstance(found, tuple)
        parts = found if is_tuple else (found,)
        chosen_BL1 = (lengths_BL <= longest)[..., None]
        made = [torch.where(chosen_BL1, *pair) for pair in zip(parts, made, strict=True)] if made else list(parts)
    return tuple(made) if is_tuple else made[0]


def _sample_lengths(position_ids_BL: Tensor) -> Tensor:
    """Return for each token how long its sample is: each begins at position 0, and so does each token of padding."""
    positions = position_ids_BL.flatten()
    sample = (positions == 0).cumsum(0)
    lengths = positions.new_zeros(positions.numel() + 1)
    return lengths.scatter_reduce(0, sample, positions + 1, "amax")[sample].view_as(position_ids_BL)


def _classes(module: Any, lengths_BL: Tensor) -> list[int]:
    """Return the longest of each class of samples that have the same frequencies, from long to short."""
    kinds = _kinds_by_length(module)
    original = min(_original_length(module, layer, kind) for layer, kind in kinds.items())
    lengths = lengths_BL.unique().tolist()  # ascending
    short, long = [n for n in lengths if n <= original], [n for n in lengths if n > original]
    if all(kind == "longrope" for kind in kinds.values()):
        long = long[-1:]
    return [*reversed(long), *short[-1:]]


def _original_length(module: Any, layer: str | None, kind: str) -> int:
    """Return how long a sample may be before the frequencies change."""
    if kind != "longrope":
        return module.original_max_seq_len
    parameters = module.config.rope_parameters
    return (parameters if layer is None else parameters[layer])["original_max_position_embeddings"]


def base_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the plain model by name, without adapters, tied ones once."""
    persistent = hf_model.state_dict().keys()
    named: dict[str, Tensor] = dict(hf_model.named_parameters())
    named |= {name: buffer for name, buffer in hf_model.named_buffers() if name in persistent}
    return {name.replace(BASE_LAYER, "."): tensor.detach() for name, tensor in named.items() if FACTOR not in name}
