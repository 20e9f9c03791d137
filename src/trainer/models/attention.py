"""Causal attention over packed rows, on any device.

A packed row holds several samples one after the other. Attention must not cross their borders, and
a mask over the whole row would cost the square of its length. So queries, keys and values are laid
out as one padded batch of samples, and causal attention runs over that: a valid token never sees
the padding, which lies behind it, and no mask is needed. The result is the one that each sample
gives alone. Registered with transformers under the name `packed`.

Shape legend: T tokens of a row, S samples in it, L the longest sample, H heads, D head dimension,
B rows of an unpacked batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface


@dataclass(frozen=True)
class PackedIndex:
    """How the tokens of a packed row lie in a padded batch of samples.

    Attributes:
        gather_SL: for each place of the padded batch, the token of the row (0 for padding).
        scatter_T: for each token of the row, its place in the flattened padded batch.
        cu_seqlens: S + 1 sample borders, int32.
        max_len: L.
    """

    gather_SL: Tensor
    scatter_T: Tensor
    cu_seqlens: Tensor
    max_len: int

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device) -> PackedIndex:
        """Return the index of a row that holds samples of these lengths in this order."""
        lengths_S = torch.tensor(lengths)
        borders = torch.cat([torch.zeros(1, dtype=torch.long), lengths_S.cumsum(0)])
        max_len = int(lengths_S.max())
        columns_L = torch.arange(max_len)
        valid_SL = columns_L[None, :] < lengths_S[:, None]
        gather_SL = torch.where(valid_SL, borders[:-1, None] + columns_L[None, :], 0)
        scatter_T = valid_SL.flatten().nonzero().squeeze(1)
        return cls(
            gather_SL=gather_SL.to(device),
            scatter_T=scatter_T.to(device),
            cu_seqlens=borders.to(torch.int32).to(device),
            max_len=max_len,
        )


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
    packed_index: PackedIndex | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend causally within each sample; the signature is transformers' attention interface.

    Args:
        query, key, value: (1, H, T, D) packed, or (B, H, L, D) with padding on the right.
        attention_mask: must be None; the structure is in `packed_index`.
        packed_index: layout of the row; None for rows of one sample each.

    Returns:
        (1, T, H, D) or (B, L, H, D), and no weights.
    """
    assert attention_mask is None, "packed attention takes no mask"
    if packed_index is None:
        return _causal(query, key, value, scaling, dropout, sliding_window).transpose(1, 2), None
    samples, longest = packed_index.gather_SL.shape

    def unpack(packed: Tensor) -> Tensor:
        flat_THD = packed[0].transpose(0, 1).index_select(0, packed_index.gather_SL.flatten())
        return flat_THD.view(samples, longest, *flat_THD.shape[1:]).transpose(1, 2)

    attended = _causal(unpack(query), unpack(key), unpack(value), scaling, dropout, sliding_window)
    flat = attended.transpose(1, 2).reshape(samples * longest, query.shape[1], value.shape[-1])
    return flat.index_select(0, packed_index.scatter_T).unsqueeze(0), None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, sliding_window: int | None
) -> Tensor:
    length = query.shape[2]
    mask = None
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (distance >= 0) & (distance < sliding_window)
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


AttentionInterface.register("packed", packed_attention)
