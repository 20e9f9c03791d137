"""Finds out if samples can share a row, by a forward pass of the model with an attention that returns zeros.

Packing has three conditions. Tokens meet only in attention: a convolution or a recurrence would carry state from one
sample into the next. Attention goes through transformers' attention interface, so that
`holdfast.trainer.model.attention` can replace it. A token's view depends only on the distance (causal, perhaps with a
sliding window), so it is the same anywhere in a row.

The probe replaces attention by a function that returns zeros and records its arguments, and the first token's embedding
by NaN. NaN times zero is NaN, so NaN reaches every token that depends on the first token without attention, whatever
the weights are.

Shape legend: B rows, L tokens of a row, H heads, D head dimension.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from holdfast.errors import DataError
from holdfast.trainer.data.packing import Arrangement
from holdfast.trainer.model.attention import without_naming
from holdfast.trainer.model.structure import other_attention, takes_positions

_PROBE = "holdfast_probe"
_PROBE_TOKENS = 160  # more than the blocks of linear attention and compressed attention
_BY_MASK = ("sdpa", "eager")  # transformers' attentions that get the samples of a row as a mask
_ROUNDING = 1e-4  # relative difference in float32 between programs that compute the same
_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """How samples are placed in the rows of a model's forward passes.

    Attributes:
        packs: whether several samples can share a row.
        attention: the transformers attention implementation to use.
        reason: why samples cannot share a row; empty if they can.
        pair_cost: cost of attention between two tokens of a sample, relative to one token's cost outside of attention.
        heads: numbers of heads of queries, and of keys and values, of the layers.
        shares: whether samples of a row can share the tokens of their prompt.
    """

    packs: bool
    attention: str
    reason: str = ""
    pair_cost: float = 0.0
    heads: frozenset[tuple[int, int]] = field(default=frozenset(), compare=False)
    shares: bool = False

    def arrangement(self, *, pack: bool) -> Arrangement:
        """Return how micro-batches are planned; see `trainer.data.packing`."""
        if not pack:
            return "rows"
        return "packed" if self.packs else "grouped"

    def cost(self, length: int) -> float:
        """Return the cost of forward and backward pass of a sample, in tokens without attention."""
        return length + self.pair_cost * length * length


PACKED = Layout(packs=True, attention="packed")


@dataclass
class _Record:
    """The calls of attention in one forward pass.

    Attributes:
        needs: the argument that tells the configured attention where samples are; None: the mask.
        masks: made for the layers, with the rule of each mask.
        faults: why a row cannot hold several samples.
        differs: implementation -> how it differs from the model's own eager attention.
    """

    needs: str | None = None
    masks: list[tuple[Tensor, _MaskFunction]] = field(default_factory=list)
    calls: int = 0
    heads: set[tuple[int, int]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    differs: dict[str, str] = field(default_factory=dict)


_recorded = _Record()


def find_layout(
    hf_model: PreTrainedModel, run: Callable[[Tensor], Tensor], attention: str, *, longest: int | None = None
) -> Layout:
    """Return the layout of a model whose weights are finite, by two forward passes. Collective.

    Args:
        run: returns the hidden states (L, hidden) of a packed row with one sample, token ids (1, L).
        attention: as configured; with `packed`, models that cannot be packed use another attention.
        longest: most tokens of a sample.

    Raise DataError if the configured attention differs from the model's attention.
    """
    record = _Record({"packed": "packed_index", **dict.fromkeys(_BY_MASK)}.get(attention, "cu_seq_lens_q"))
    # False for a model that chose its attention when it was built; another attention could fail.
    takes_any = hf_model._can_set_attn_implementation()
    reason = "" if takes_any else "its layers do not use transformers' attention interface"
    limit = longest or getattr(hf_model.config.get_text_config(), "max_position_embeddings", None) or _PROBE_TOKENS
    if not reason:
        # Offloaded layers are on another device until they compute.
        device = next(hf_model.get_input_embeddings().parameters()).device
        ids_1L = torch.zeros(1, min(_PROBE_TOKENS, limit), dtype=torch.long, device=device)
        with torch.no_grad(), _probing(hf_model, record):
            clean_L = run(ids_1L).isfinite().all(-1)
            with _broken_first_token(hf_model):
                broken_L = run(ids_1L).isfinite().all(-1)
        if not torch.equal(clean_L[1:], broken_L[1:]) or not clean_L.all():
            reason = "its tokens meet outside of attention, in a convolution, a recurrence or the like"
        elif record.faults:
            reason = record.faults[0]
    if not reason and not takes_positions(hf_model):
        reason = "it counts positions along the row by itself"
    differs = record.differs
    if attention == "packed":
        if not reason and "packed" in differs:
            reason = f"its attention is not that of packed rows ({differs['packed']})"
        if not reason:
            return replace(PACKED, heads=frozenset(record.heads))
        plain = hf_model._supports_sdpa and record.calls > 0 and "sdpa" not in differs
        return Layout(False, "sdpa" if plain else "eager", reason)
    if attention in _BY_MASK and not reason:
        reason = f"{attention} attention would need a mask of the square of the row's length"
    if attention == "sdpa" and "sdpa" in differs:
        raise DataError(
            f"model.attention = sdpa is not the attention of {type(hf_model).__name__} ({differs['sdpa']}): leave "
            "model.attention as it is, or set it to eager"
        )
    return Layout(not reason, attention, reason)


@contextmanager
def _probing(hf_model: PreTrainedModel, record: _Record) -> Iterator[None]:
    global _recorded
    before, _recorded = _recorded, record
    was_training = hf_model.training
    hf_model.eval()
    try:
        with other_attention(hf_model, _PROBE):
            yield
    finally:
        hf_model.train(was_training)
        _recorded = before


@contextmanager
def _broken_first_token(hf_model: PreTrainedModel) -> Iterator[None]:
    def break_first(_module: nn.Module, _args: Any, output_BLH: Tensor) -> Tensor:
        output_BLH = output_BLH.clone()
        output_BLH[:, 0] = math.nan
        return output_BLH

    handle = hf_model.get_input_embeddings().register_forward_hook(break_first)
    try:
        yield
    finally:
        handle.remove()


def _probe_mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: _MaskFunction, device: torch.device, **_: Any
) -> Tensor:
    """Return a mask that masks nothing, and record its rule; transformers' mask interface."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    _recorded.masks.append((mask, mask_function))
    return mask


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Return zeros, and record what packed attention cannot do; transformers' attention interface."""
    record = _recorded
    record.calls += 1
    record.heads.add((query.shape[1], key.shape[1]))
    window = arguments.get("sliding_window")
    if key.shape[2] != query.shape[2]:
        record.faults.append("its queries and keys differ in number")
    elif record.needs and arguments.get(record.needs) is None:
        record.faults.append("its layers do not tell attention where the samples of a row are")
    elif arguments.get("is_causal") is False:
        record.faults.append("its attention is not causal")
    else:
        functions = [function for mask, function in record.masks if mask is attention_mask]
        if not functions:
            record.faults.append("its attention changes the mask that it is given")
        elif not _is_causal_window(functions[0], window, query.device, module):
            record.faults.append("what its tokens see depends on more than a sliding window")
    for name in ("packed", "sdpa"):
        if name not in record.differs and (difference := _difference(name, module, query, key, value, arguments)):
            record.differs[name] = difference
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _difference(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> str:
    """Return how an implementation differs from the module's own eager attention on random input; empty if equal."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        return ""
    generator = torch.Generator().manual_seed(0)
    length = 6
    arguments = {name: given for name, given in arguments.items() if name != "packed_index"}

    def random(like: Tensor) -> Tensor:
        drawn = torch.randn(1, like.shape[1], length, like.shape[-1], generator=generator)
        return (3 * drawn).to(like.device)

    given = (random(query), random(key), random(value))
    window = arguments.get("sliding_window")
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None].to(query.device)
    masks = {"packed": None, "sdpa": seen[None, None].to(query.device)}
    with torch.no_grad(), without_naming():
        expected = own(module, *given, additive, **arguments)[0]
        try:
            found = ALL_ATTENTION_FUNCTIONS[name](module, *given, masks[name], **arguments)[0]
        except DataError as error:
            return str(error)
    apart = float((found - expected).abs().max()) / float(expected.abs().max())
    return f"the results are {apart:.2g} apart" if not apart <= _ROUNDING else ""


def _is_causal_window(function: _MaskFunction, window: int | None, device: torch.device, module: nn.Module) -> bool:
    """Whether a mask function is causal attention with at most a sliding window, at near and far positions."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
    limit = max(_PROBE_TOKENS, getattr(text, "max_position_embeddings", None) or 2**15)
    near = torch.arange(64)
    powers = torch.tensor([2**k + d for k in range(6, 22) for d in (-1, 0, 1) if 2**k + d < limit], dtype=torch.long)
    spread = (torch.arange(96) * 0.6180339887 % 1.0 * limit).long()
    edges = torch.tensor([window - 1, window, window + 1] if window else [], dtype=torch.long)
    places = torch.cat([near, powers, spread, spread + 1, edges, torch.tensor([limit - 1])])
    places = places[places < limit].unique().to(device)
    queries, keys = places[:, None], places[None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    try:
        sees = function(zero, zero, queries, keys)
    except (IndexError, RuntimeError):  # a lookup by position
        return False
    expected = keys <= queries
    if window is not None:
        expected = expected & (queries - keys < window)
    return bool(torch.equal(torch.as_tensor(sees).expand_as(expected), expected))


AttentionInterface.register(_PROBE, _probe_attention)
AttentionMaskInterface.register(_PROBE, _probe_mask)
