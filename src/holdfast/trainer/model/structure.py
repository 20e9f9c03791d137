"""Finds the parts of a transformers model: decoder, layers, attention, head and rotary embeddings.

Most heads are a matrix, perhaps with a bias and a soft cap, which `token_logprobs` computes. Some heads scale or cap in
code of their own. If the model's own forward gives other logits than `token_logprobs`, the model's own logits are used,
also in chunks.

Two kinds of rotary embeddings change their frequencies for samples longer than the training length: `longrope` (Ding et
al. 2024, https://arxiv.org/abs/2402.13753) and `dynamic` NTK scaling. transformers uses the largest position of a whole
batch, and `dynamic` also of earlier batches, so longer samples would depend on their neighbours. They are refused.

Shape legend: B rows, L tokens of a row, C tokens of a chunk, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from holdfast.errors import DataError

BASE_LAYER = ".base_layer."
"""In peft's names of the layer beside an adapter."""

FACTOR = ".lora_"
"""In peft's names of an adapter's tensors."""

_OFFSET = 2  # unused rows in the tables of OPT and models after it


def decoder_of(hf_model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head. Raise DataError if it cannot be told from the head."""
    inside = [module for module in hf_model.children() if isinstance(module, PreTrainedModel)]
    for found in (hf_model.get_decoder(), hf_model.base_model, *inside):
        if isinstance(found, PreTrainedModel) and found is not hf_model:
            return found
    raise DataError(f"{type(hf_model).__name__} has no decoder apart from its head and cannot be trained here")


def decoder_layers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer layers: the units of sharding, compiling and recomputing."""
    lists = [module for module in decoder_of(hf_model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise DataError(f"{type(hf_model).__name__} has no list of decoder layers and cannot be sharded")
    # The largest list: lists inside layers (experts) are parts of it.
    return list(max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters())))


def takes_positions(hf_model: PreTrainedModel) -> bool:
    """Whether the decoder can be told the position of each token."""
    return "position_ids" in inspect.signature(decoder_of(hf_model).forward).parameters


def longest_sample(hf_model: PreTrainedModel) -> int | None:
    """Return how many tokens a sample may have; None: any number."""
    limits = list(_rotary_lengths(hf_model))
    limit = getattr(hf_model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and any(limit <= rows <= limit + _OFFSET for rows in _table_sizes(hf_model)):
        limits.append(limit)
    return min(limits, default=None)


def _table_sizes(hf_model: PreTrainedModel) -> Iterator[int]:
    """Yield the number of rows of each table that may hold positions, learned or computed."""
    words = hf_model.get_input_embeddings()
    for module in hf_model.modules():
        if isinstance(module, nn.Embedding) and module is not words:
            yield module.num_embeddings
    for buffer in hf_model.buffers():
        if buffer.ndim == 2:
            yield buffer.shape[0]


def _rotary_lengths(hf_model: nn.Module) -> Iterator[int]:
    """Yield the lengths beyond which rotary frequencies change with the length of a sample."""
    for found in hf_model.modules():
        module: Any = found
        kinds = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                yield (parameters if layer is None else parameters[layer])["original_max_position_embeddings"]
            elif isinstance(kind, str) and "dynamic" in kind:
                yield module.original_max_seq_len


def pair_cost(hf_model: PreTrainedModel) -> float:
    """Return the cost of attention between two tokens of a sample, in costs of one token outside of attention.

    By floating-point operations: 6 per parameter and token, and 12 times layers and hidden size per pair of tokens, of
    which causal attention needs half (Chowdhery et al. 2022, "PaLM", appendix B). An estimate: it takes all heads
    together to be as wide as the hidden size, and counts neither windows nor that tokens skip experts. 0 if config.json
    does not say how large attention is."""
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
    """The output of a decoder with these hidden states, and None as all other fields."""

    def __init__(self, hidden_BLH: Tensor) -> None:
        self.last_hidden_state = hidden_BLH

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(hf_model: PreTrainedModel, hidden_CH: Tensor) -> Tensor:
    """Return the logits (C, V) that the model's own forward computes from hidden states."""
    decoders = list({id(module): module for module in (hf_model.base_model, decoder_of(hf_model))}.values())
    decoders = [module for module in decoders if module is not hf_model]
    ids_1C = torch.zeros(1, hidden_CH.shape[0], dtype=torch.long, device=hidden_CH.device)
    with _giving(decoders, _Given(hidden_CH[None])):
        return hf_model(input_ids=ids_1C, use_cache=False).logits[0]


def compute_in_float32(head: nn.Module) -> None:
    """Have an output embedding multiply in float32. The model's own scaling and caps after it are in float32, too."""

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.get_parameter("weight").float(), getattr(head, "bias", None)
        return nn.functional.linear(hidden.float(), weight, None if bias is None else bias.float())

    head.forward = forward


@contextmanager
def _giving(modules: list[nn.Module], output: _Given) -> Iterator[None]:
    for module in modules:
        module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def has_plain_head(hf_model: PreTrainedModel, softcap: float | None) -> bool:
    """Whether the logits are only the output embedding times the hidden states, capped by `softcap`.

    All weights of the head must be 1, so that they cannot hide a difference."""
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


def buffer_frozen(hf_model: PreTrainedModel) -> None:
    """Make buffers of frozen parameters that transformers keeps in float32: mixed precision rounds parameters."""
    kept = hf_model._keep_in_fp32_modules_strict or ()
    for place, module in hf_model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad and any(one in f"{place}.{name}" for one in kept):
                delattr(module, name)
                module.register_buffer(name, parameter.data)


def base_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the plain model by name, without adapters, tied tensors once."""
    persistent = hf_model.state_dict().keys()
    named: dict[str, Tensor] = dict(hf_model.named_parameters())
    named |= {name: buffer for name, buffer in hf_model.named_buffers() if name in persistent}
    return {name.replace(BASE_LAYER, "."): tensor.detach() for name, tensor in named.items() if FACTOR not in name}
