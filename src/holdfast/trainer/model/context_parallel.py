"""Context parallelism: neighbouring ranks share the rows of a micro-batch, each with a slice of the tokens.

Jacobs et al. 2023, "DeepSpeed Ulysses" (https://arxiv.org/abs/2309.14509). A rank holds one slice of each row. Around
attention an all-to-all swaps tokens for heads, so each rank attends to whole rows with its share of the heads. After
the last layer the results (log-probabilities, values) of all ranks are joined, so losses see whole rows.

Every rank of a group computes the same loss, and the gradient of its own tokens. These gradients add up to the gradient
of the loss.

Shape legend: B rows, L tokens of a row, S ranks of a group, T tokens of a slice (L / S, rounded up). H heads, D head
dimension. N places in the flattened (B * L) rows, O places in this rank's slice.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from holdfast.trainer.mesh import SequenceGroup


def reason_against(heads: int, key_heads: int, num_ranks: int) -> str:
    """Return why `num_ranks` ranks cannot share the heads of attention; empty if they can."""
    if heads % num_ranks:
        return f"its attention has {heads} heads, which {num_ranks} ranks cannot share evenly"
    if key_heads % num_ranks and num_ranks % key_heads:
        return f"its attention has {key_heads} heads of keys and values, which {num_ranks} ranks cannot share evenly"
    return ""


@dataclass(frozen=True)
class RowSlice:
    """This rank's tokens of the rows, of `length` L, that `ranks` share."""

    ranks: SequenceGroup
    length: int

    @property
    def width(self) -> int:
        """Tokens of a slice, T. The last slice may end with padding."""
        return -(-self.length // self.ranks.size)

    def of(self, rows_BL: Tensor) -> Tensor:
        """Return this rank's part of each row, (B, T), with zeros for padding."""
        padded = F.pad(rows_BL, (0, self.width * self.ranks.size - self.length))
        return padded[:, self.ranks.rank * self.width :][:, : self.width]

    def own(self, index_N: Tensor) -> Tensor:
        """Return which of the places are in this rank's slice, (O,), as indices into N."""
        return (index_N % self.length // self.width == self.ranks.rank).nonzero().squeeze(1)

    def places(self, index_N: Tensor) -> Tensor:
        """Return the places of `own` in the flattened slices (B * T), (O,)."""
        index_O = index_N[self.own(index_N)]
        return index_O // self.length * self.width + index_O % self.length - self.ranks.rank * self.width

    def whole(self, values_O: Tensor, index_N: Tensor) -> Tensor:
        """Join the values of all ranks, (N, ...). Collective in the group."""
        return _Whole.apply(values_O, self.own(index_N), len(index_N), self.ranks.group)  # type: ignore[return-value]

    def whole_rows(self, heads_BHTD: Tensor) -> Tensor:
        """Return all tokens of this rank's share of the heads, (B, H / S, L, D). Collective in the group.

        Heads of keys and values are repeated if they are fewer than the ranks."""
        size = self.ranks.size
        if heads_BHTD.shape[1] < size:
            heads_BHTD = heads_BHTD.repeat_interleave(size // heads_BHTD.shape[1], 1)
        rows, heads, width, head_dim = heads_BHTD.shape
        by_rank = heads_BHTD.view(rows, size, heads // size, width, head_dim).transpose(0, 1)
        swapped_SBHTD = _swap(by_rank, self.ranks)
        whole = swapped_SBHTD.permute(1, 2, 0, 3, 4).reshape(rows, heads // size, size * width, head_dim)
        return whole[:, :, : self.length]

    def own_tokens(self, attended_BLHD: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, (B, T, H * S, D). Collective in the group."""
        size, width = self.ranks.size, self.width
        rows, _, heads, head_dim = attended_BLHD.shape
        padded = F.pad(attended_BLHD, (0, 0, 0, 0, 0, size * width - self.length))
        by_rank = padded.view(rows, size, width, heads, head_dim).transpose(0, 1)
        swapped_SBTHD = _swap(by_rank, self.ranks)
        return swapped_SBTHD.permute(1, 2, 0, 3, 4).reshape(rows, width, size * heads, head_dim)

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Return the values of this rank's share of the heads, (H / S,)."""
        return values_H.chunk(self.ranks.size)[self.ranks.rank]


def _swap(by_rank: Tensor, ranks: SequenceGroup) -> Tensor:
    """Exchange along the first dimension: part i goes to rank i of the group."""
    return _AllToAll.apply(by_rank, ranks.group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    """`dist.all_to_all_single` in equal parts; the backward pass exchanges the gradients."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(by_rank, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    given = by_rank.contiguous()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    return received


class _Whole(torch.autograd.Function):
    """Joins the values that each rank has at its own places; the gradient goes back to these places."""

    @staticmethod
    def forward(ctx: Any, values_O: Tensor, own_O: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_O)
        whole_N = values_O.new_zeros(count, *values_O.shape[1:])
        whole_N[own_O] = values_O
        # Other ranks add zero, which changes no bit.
        dist.all_reduce(whole_N, group=group)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own_O,) = ctx.saved_tensors
        return gradients[0][own_O], None, None, None
