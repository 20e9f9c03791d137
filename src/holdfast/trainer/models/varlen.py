"""Causal attention over samples of any lengths in one kernel, without padding and without a mask.

PyTorch has such a kernel for GPUs: `torch.nn.attention.varlen`, FlashAttention 2 (Dao 2023,
https://arxiv.org/abs/2307.08691) over borders of samples. What it does not compute is named by `reason_against`, and
`holdfast.trainer.models.attention` attends to a padded batch then.

Shape legend: T tokens, S samples, H heads, K heads of keys and values, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_HEAD_STEP = 8  # of head dimensions, that the kernel's loads are made for
# torch before 2.12 takes groups of heads without being told.
_GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Attend(Protocol):
    """Attention of queries (T, H, D) to keys and values (T, K, D), within samples whose borders are `borders`."""

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        borders: Tensor,
        longest: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor: ...


def _flash(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    borders: Tensor,
    longest: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    groups = _GROUPS if query_THD.shape[1] != key_TKD.shape[1] else {}
    attended = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        borders,
        borders,
        longest,
        longest,
        scale=scale,
        window_size=window_size,
        **groups,
    )
    return cast(Tensor, attended)  # a pair only where a second result is asked for


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what it takes.

    Attributes:
        attend: gives (T, H, D). Window (left, right) as in FlashAttention: so many tokens before and behind a token's
            own are seen, all where it is -1.
        dtypes: of queries, keys and values.
        largest_head: most numbers of a head.
        is_usable: whether a device has what the kernel needs, by its index.
    """

    attend: Attend
    dtypes: frozenset[torch.dtype]
    largest_head: int
    is_usable: Callable[[int | None], bool] = lambda _: True


@torch.compiler.assume_constant_result  # asking for it would break the graph of every compiled layer
def _is_ampere(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


KERNELS = {"cuda": Kernel(_flash, frozenset({torch.bfloat16, torch.float16}), 256, _is_ampere)}
"""By the type of device. On others a padded batch is what there is, and not a way out."""


def reason_against(
    kernel: Kernel,
    *,
    dtypes: set[torch.dtype],
    head_dims: tuple[int, int],
    is_usable: bool = True,
    dropout: float = 0.0,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> str:
    """Return why `kernel` cannot be taken, in words; empty where it can.

    Args:
        dtypes: of queries, keys and values.
        head_dims: of queries and keys, and of values.
        is_usable: what the kernel says of the device.
    """
    if not is_usable:
        return "the GPU is older than Ampere"
    if len(dtypes) > 1 or not dtypes <= kernel.dtypes:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        known = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes))
        return f"it takes {known}, and attention is in {names}"
    if max(head_dims) > kernel.largest_head:
        return f"it takes heads of up to {kernel.largest_head} numbers, and the model's have {max(head_dims)}"
    if dropout > 0:
        return "it has no dropout"
    if softcap is not None:
        return "it has no soft caps of scores"
    return "it has no sinks" if has_sinks else ""


def attend_by_kernel(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    borders: Tensor | None,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Return causal attention within samples, (B, L, H, D).

    Args:
        query, key, value: (B, H or K, L, D); with `borders`, B is 1 and L the tokens of a packed row.
        borders: S + 1 borders of the samples, int32, on their device; None: every row is one sample.
        longest: tokens of the longest sample.
        sliding_window: tokens that a token sees, its own among them.
    """
    batch, heads, length, head_dim = query.shape
    value_dim = value.shape[-1]
    if borders is None:
        borders = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    # Zeros add nothing to a score, and nothing to a value.
    width = -(-max(head_dim, value_dim) // _HEAD_STEP) * _HEAD_STEP

    def flat(tensor: Tensor) -> Tensor:
        rows = tensor.transpose(1, 2).reshape(batch * length, tensor.shape[1], tensor.shape[-1])
        return F.pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows

    # A window counts the token itself, the kernel only those before it. (-1, 0) is plain causal attention.
    before = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1
    attended_THD = kernel.attend(
        flat(query),
        flat(key),
        flat(value),
        borders,
        longest,
        scale=head_dim**-0.5 if scaling is None else scaling,
        window_size=(before, 0),
    )
    return attended_THD[..., :value_dim].reshape(batch, length, heads, value_dim)
