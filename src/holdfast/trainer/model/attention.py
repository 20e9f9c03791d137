"""Causal attention over packed rows, on any device, registered with transformers as `packed`.

Attention must not cross the borders of the samples in a row, and a mask over the whole row would cost the square of its
length. On GPUs one kernel takes samples of any lengths: `torch.nn.attention.varlen`, FlashAttention 2 (Dao 2023,
https://arxiv.org/abs/2307.08691).

On a CPU, or if the kernel lacks a feature (the log says which), queries, keys and values become padded batches of
samples of similar length. Causal attention over each batch needs no mask: the valid tokens never see the padding, which
comes after them.

Samples that share a prompt have only their own tokens as queries; their keys are the prompt's and their own. A padded
batch of them has one prompt, and a mask that all of its samples share.

Soft caps of the scores (Gemma 2, https://arxiv.org/abs/2408.00118) and learned sinks (gpt-oss,
https://arxiv.org/abs/2508.10925) are computed with plain matrix products. Unknown arguments are refused, and
`holdfast.trainer.model.packing_check` finds models with such arguments before.

Shape legend: T tokens of a row, E tokens that its samples see (`PackedIndex.seen_E`), S samples of a padded batch, L
tokens of the longest sample. P tokens of a shared prompt, H heads, K heads of keys and values. D head dimension, B rows
of an unpacked batch.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from holdfast.errors import DataError
from holdfast.trainer.data.packing import PackedIndex
from holdfast.trainer.model.context_parallel import RowSlice

_log = logging.getLogger("trainer")

_HEAD_STEP = 8  # the kernel loads so many numbers of a head at once
# torch before 2.12 takes groups of heads without being told.
_GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    key_borders: Tensor,
    longest: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    groups = _GROUPS if query.shape[1] != key.shape[1] else {}
    lengths = (borders, key_borders, longest, longest)
    attended = varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, **groups)
    return cast(Tensor, attended)


@dataclass(frozen=True)
class Kernel:
    """A kernel for samples of any lengths, and its limits.

    Attributes:
        attend: attention (T, H, D) of queries (T, H, D) to keys and values (E, K, D) within samples, which have borders
            in both. The last query of a sample sees its last key. `window_size` as in FlashAttention: tokens before and
            after that are seen, -1 for all.
        largest_head: most numbers of a head.
        is_usable: whether the GPU with this index has what the kernel needs.
    """

    attend: Callable[..., Tensor]
    dtypes: frozenset[torch.dtype]
    largest_head: int
    is_usable: Callable[[int | None], bool] = lambda _: True


@torch.compiler.assume_constant_result  # else the call would break the graph of every compiled layer
def _is_ampere(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


KERNELS = {"cuda": Kernel(_flash, frozenset({torch.bfloat16, torch.float16}), 256, _is_ampere)}
"""By the type of device."""


def attend_by_kernel(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    packed_index: PackedIndex | None,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Return causal attention within samples, (B, L, H, D).

    Args:
        query, key, value: (B, H or K, L, D); with `packed_index`, B is 1 and L the tokens of a packed row.
        packed_index: None if every row is one sample.
        sliding_window: tokens that a token sees, itself included.
    """
    batch, heads, length, head_dim = query.shape
    value_dim = value.shape[-1]
    if packed_index is None:
        longest = length
        borders = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        key_borders = borders
    else:
        longest = packed_index.max_len
        borders, key_borders = packed_index.cu_seqlens, packed_index.cu_seqlens_seen
        if packed_index.seen_E is not None:
            key, value = (tensor.index_select(2, packed_index.seen_E) for tensor in (key, value))
    # Padding with zeros changes neither scores nor values.
    width = -(-max(head_dim, value_dim) // _HEAD_STEP) * _HEAD_STEP

    def flat(tensor: Tensor) -> Tensor:
        rows = tensor.transpose(1, 2).flatten(0, 1)
        return F.pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows

    # The kernel counts only the tokens before. (-1, 0) is plain causal attention.
    before = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1
    attended_THD = kernel.attend(
        flat(query),
        flat(key),
        flat(value),
        borders,
        key_borders,
        longest,
        scale=head_dim**-0.5 if scaling is None else scaling,
        window_size=(before, 0),
    )
    return attended_THD[..., :value_dim].reshape(batch, length, heads, value_dim)


IRRELEVANT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Arguments that do not change attention within samples."""

_named: set[str] = set()
_is_silent = False


@contextmanager
def without_naming() -> Iterator[None]:
    """Log nothing about the kernel in the block, which probes attention."""
    global _is_silent
    before, _is_silent = _is_silent, True
    try:
        yield
    finally:
        _is_silent = before


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_index: PackedIndex | None = None,
    row_slice: RowSlice | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sample; the signature is transformers' attention interface.

    Args:
        query, key, value: (1, H, T, D) packed, or (B, H, L, D) with padding on the right.
        attention_mask: must be None; `packed_index` has the structure.
        softcap: c in scores = c * tanh(scores / c).
        s_aux: the score (H,) of a sink that takes part in the softmax and has no value.
        packed_index: layout of the row; None for rows of one sample each.
        row_slice: if ranks share rows; query, key and value are then this rank's tokens.

    Returns:
        (1, T, H, D) or (B, L, H, D), and no weights.

    Raise DataError if the model calls attention with an unknown argument.
    """
    unknown = sorted(name for name, given in others.items() if given is not None and name not in IRRELEVANT)
    if unknown or is_causal is False:
        raise DataError(
            f"{type(module).__name__} calls its attention with {', '.join(unknown) or 'is_causal = False'}, which "
            "packed attention does not know: set model.attention to eager"
        )
    assert attention_mask is None, "packed attention takes no mask"
    if row_slice is not None:
        attended, _ = packed_attention(
            module,
            row_slice.whole_rows(query),
            row_slice.whole_rows(key),
            row_slice.whole_rows(value),
            None,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=None if s_aux is None else row_slice.own_heads(s_aux),
            packed_index=packed_index,
        )
        return row_slice.own_tokens(attended), None
    kernel = _kernel_for(module, query, key, value, dropout=dropout, softcap=softcap, has_sinks=s_aux is not None)
    if kernel is not None:
        attended = attend_by_kernel(
            kernel, query, key, value, packed_index=packed_index, scaling=scaling, sliding_window=sliding_window
        )
        return attended, None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if softcap is None and s_aux is None:
            return _causal(query, key, value, scaling, dropout, sliding_window)
        return _causal_scores(query, key, value, scaling, dropout, sliding_window, softcap=softcap, sinks_H=s_aux)

    if packed_index is None:
        return attend(query, key, value).transpose(1, 2), None
    return _attend_padded(attend, query, key, value, packed_index), None


# Each number of batches would be a graph of its own, and after some of them nothing is compiled any more.
@torch.compiler.disable()
def _attend_padded(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, index: PackedIndex
) -> Tensor:
    """Return (1, T, H, D): attention over the samples of a packed row, which `attend` gets as (S, H, L, D)."""
    own = torch.cat([gather_SL.flatten() for gather_SL in index.gather_SL])
    sizes = [gather_SL.numel() for gather_SL in index.gather_SL]

    def batches(packed: Tensor, *, with_prefix: bool) -> list[Tensor]:
        tokens_THD = packed[0].transpose(0, 1)
        parts = tokens_THD.index_select(0, own).split(sizes)
        found = []
        for part, gather_SL, prefix_P in zip(parts, index.gather_SL, index.prefix_P, strict=True):
            batch_SLHD = part.view(*gather_SL.shape, *part.shape[1:])
            if with_prefix and prefix_P.numel():
                prefix_PHD = tokens_THD.index_select(0, prefix_P)
                batch_SLHD = torch.cat([prefix_PHD.expand(len(gather_SL), *prefix_PHD.shape), batch_SLHD], dim=1)
            found.append(batch_SLHD.transpose(1, 2))
        return found

    rows = zip(batches(query, with_prefix=False), batches(key, with_prefix=True), batches(value, with_prefix=True),
               strict=True)  # fmt: skip
    attended = [attend(*batch).transpose(1, 2).flatten(0, 1) for batch in rows]
    return torch.cat(attended).index_select(0, index.scatter_T).unsqueeze(0)


def _kernel_for(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    softcap: float | None,
    has_sinks: bool,
) -> Kernel | None:
    """Return the kernel to use; None if the device has none, or if it cannot be used, which is logged once."""
    kernel = KERNELS.get(query.device.type)
    if kernel is None:
        return None
    dtypes, largest_head = {query.dtype, key.dtype, value.dtype}, max(query.shape[-1], value.shape[-1])
    fits = len(dtypes) == 1 and dtypes <= kernel.dtypes and largest_head <= kernel.largest_head
    if fits and not dropout and softcap is None and not has_sinks and kernel.is_usable(query.device.index):
        return kernel
    # Compiled code cannot log; the parity check at the start is not compiled.
    name = type(module).__name__
    if not torch.compiler.is_compiling() and not _is_silent and name not in _named:
        _named.add(name)
        _log.warning(
            "%s attends to padded batches of samples, which takes more time and memory, and with a sliding window a "
            "mask of the square of the longest sample. PyTorch's kernel for variable lengths needs an Ampere GPU, %s, "
            "heads of up to %d numbers, and neither dropout nor soft caps of scores nor sinks; this attention is in %s "
            "with heads of %d numbers.",
            name,
            " or ".join(sorted(map(str, kernel.dtypes))),
            kernel.largest_head,
            " and ".join(sorted(map(str, dtypes))),
            largest_head,
        )
    return None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, sliding_window: int | None
) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    mask = None
    # No mask if the window holds all tokens and there is no prefix: SDPA has faster kernels for is_causal.
    if keys > queries or (sliding_window is not None and keys > sliding_window):
        mask = _seen(queries, keys, sliding_window, query.device)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _seen(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Return which query sees which key, (queries, keys); the last query is the last key's token."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (sliding_window or keys))


def _causal_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    *,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute attention like `_causal`, with the scores (B, H, queries, keys) as a tensor."""
    queries, keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    # finfo.min rather than -inf, as in transformers' own masks.
    scores = scores.masked_fill(~_seen(queries, keys, sliding_window, query.device), torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    # In float32 and back, as transformers' eager attention. The sink takes its share and is dropped.
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :keys]
    return F.dropout(weights, dropout) @ value


AttentionInterface.register("packed", packed_attention)
