"""From samples to the tensors of one forward pass. Which samples share one: `holdfast.trainer.data.row_plan`.

Shape legend: B rows, L tokens of a row, N predicted tokens of the micro-batch; a packed row: T tokens; a padded
batch of its samples: S samples, L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

_SHORT = 64
"""Tokens up to which samples share a padded batch, however short they are: a call would cost more than the padding."""
_FILLED = 0.75
"""The least share of its row that a longer sample fills: a higher one means more calls, a lower one more padding."""


@dataclass(frozen=True)
class PackedIndex:
    """How the tokens of a packed row lie in padded batches, each of samples of about the same length.

    Attributes:
        gather_SL: of each padded batch, for each of its places, the token of the row (0 for padding).
        scatter_T: for each token of the row, its place in the padded batches, flattened one after the other.
        cu_seqlens: borders of the samples in the row, one more than there are samples, int32.
        max_len: the longest sample.
    """

    gather_SL: tuple[Tensor, ...]
    scatter_T: Tensor
    cu_seqlens: Tensor
    max_len: int

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device) -> PackedIndex:
        """Return the index of a row that holds samples of these lengths in this order."""
        borders = np.cumsum([0, *lengths])
        gather_SL, scatter_T, places = [], np.empty(borders[-1], dtype=np.int64), 0
        for members in _by_length(lengths):
            lengths_S = np.array([lengths[member] for member in members])
            columns_L = np.arange(lengths_S.max())
            valid_SL = columns_L < lengths_S[:, None]
            tokens_SL = borders[members][:, None] + columns_L
            scatter_T[tokens_SL[valid_SL]] = places + np.flatnonzero(valid_SL)
            gather_SL.append(to_device(torch.from_numpy(np.where(valid_SL, tokens_SL, 0)), device))
            places += valid_SL.size
        return cls(
            gather_SL=tuple(gather_SL),
            scatter_T=to_device(torch.from_numpy(scatter_T), device),
            cu_seqlens=to_device(torch.from_numpy(borders.astype(np.int32)), device),
            max_len=max(lengths),
        )


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return which samples are in which padded batch: the longest first, and in the order of the row within one."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (longest <= _SHORT or lengths[index] >= _FILLED * longest):
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return [sorted(batch) for batch in batches]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on `device`; to a GPU without waiting for what it was told to do before."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    # Pinned: from other memory the copy would begin when the GPU has nothing left to do, and this thread wait for it.
    return tensor.pin_memory().to(device, non_blocking=True)  # untested: needs a GPU


@dataclass(frozen=True)
class Sample:
    """One sequence to train on; or several, one behind the other, which a loss sees as one.

    Attributes:
        token_ids: int32 array of length L.
        loss_mask: bool array of length L: which tokens are trained. The first is never trained,
            since nothing predicts it.
        per_token: further float32 arrays of length L that follow the tokens, such as advantages.
        value: a number that its row says of it, such as the margin of a pair; 0 where it says none.
        starts: where its sequences begin. No token sees those of another, and the first of each is never trained.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)
    value: float = 0.0
    starts: tuple[int, ...] = (0,)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of its sequences."""
        return [end - start for start, end in pairwise([*self.starts, len(self.token_ids)])]

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and trained."""
        return int(self.loss_mask[1:].sum())

    def cut(self, length: int) -> Sample:
        """Return its first `length` tokens."""
        per_token = {name: values[:length] for name, values in self.per_token.items()}
        starts = tuple(start for start in self.starts if start < max(1, length))
        return Sample(self.token_ids[:length], self.loss_mask[:length], per_token, self.value, starts)

    @property
    def targets(self) -> np.ndarray:
        """Places of the tokens that are predicted and trained."""
        return np.flatnonzero(self.loss_mask[1:]) + 1


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass.

    Attributes:
        input_ids_BL, position_ids_BL: tokens and their positions within their sequence.
        predict_index_N: places in the flattened rows whose hidden state predicts a target.
        target_ids_N: the predicted tokens.
        sample_index_N: which sample of the step each target belongs to.
        targets_per_sample: targets of each sample, in their order.
        per_token: each of the samples' arrays at the targets, (N,).
        packed_index: where sequences lie in a packed row; None for one sequence a row.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    predict_index_N: Tensor
    target_ids_N: Tensor
    sample_index_N: Tensor
    targets_per_sample: tuple[int, ...]
    per_token: dict[str, Tensor]
    packed_index: PackedIndex | None


def build_micro_batch(samples: Sequence[Sample], indices: list[int], *, pack: bool, device: torch.device) -> MicroBatch:
    """Return the micro-batch of these samples; with no samples, one that trains on nothing."""
    if not indices:
        return _empty(samples[0], pack, device)
    chosen = [samples[index] for index in indices]
    lengths = [length for sample in chosen for length in sample.lengths]
    row_length = sum(lengths) if pack else max(lengths)
    starts = [sum(lengths[:k]) for k in range(len(lengths))] if pack else [k * row_length for k in range(len(lengths))]
    total = row_length if pack else row_length * len(lengths)
    sequences = zip(starts, lengths, strict=True)
    input_ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    predict, targets, owners = [], [], []
    per_token: dict[str, list[np.ndarray]] = {name: [] for name in chosen[0].per_token}
    for index, sample in zip(indices, chosen, strict=True):
        own = list(islice(sequences, len(sample.starts)))
        places = np.concatenate([np.arange(start, start + length) for start, length in own])
        input_ids[places] = sample.token_ids
        positions[places] = np.concatenate([np.arange(length) for _, length in own])
        trained = sample.targets
        # The first of a sequence is no target, so the token before is one of the same sequence.
        predict.append(places[trained - 1])
        targets.append(sample.token_ids[trained])
        owners.append(np.full(len(trained), index))
        for name, values in per_token.items():
            values.append(sample.per_token[name][trained])
    rows = 1 if pack else len(lengths)

    def on_device(array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)

    return MicroBatch(
        input_ids_BL=on_device(input_ids.reshape(rows, row_length)),
        position_ids_BL=on_device(positions.reshape(rows, row_length)),
        predict_index_N=on_device(np.concatenate(predict)),
        target_ids_N=on_device(np.concatenate(targets).astype(np.int64)),
        sample_index_N=on_device(np.concatenate(owners)),
        targets_per_sample=tuple(map(len, owners)),
        per_token={name: on_device(np.concatenate(values).astype(np.float32)) for name, values in per_token.items()},
        packed_index=PackedIndex.from_lengths(lengths, device=device) if pack else None,
    )


def _empty(like: Sample, pack: bool, device: torch.device) -> MicroBatch:
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    return MicroBatch(
        input_ids_BL=one,
        position_ids_BL=one,
        predict_index_N=nothing,
        target_ids_N=nothing,
        sample_index_N=nothing,
        targets_per_sample=(),
        per_token={name: torch.zeros(0, device=device) for name in like.per_token},
        packed_index=PackedIndex.from_lengths([1], device=device) if pack else None,
    )
