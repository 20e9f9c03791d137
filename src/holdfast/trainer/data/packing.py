"""From samples to the tensors of one forward pass. Which samples share one: `holdfast.trainer.data.row_plan`.

Shape legend: B rows, L tokens of a row, N predicted tokens of the micro-batch; a packed row: T tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


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
            gather_SL=to_device(gather_SL, device),
            scatter_T=to_device(scatter_T, device),
            cu_seqlens=to_device(borders.to(torch.int32), device),
            max_len=max_len,
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on `device`; to a GPU without waiting for what it was told to do before."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    # Pinned: from other memory the copy would begin when the GPU has nothing left to do, and this thread wait for it.
    return tensor.pin_memory().to(device, non_blocking=True)  # untested: needs a GPU


@dataclass(frozen=True)
class Sample:
    """One sequence to train on.

    Attributes:
        token_ids: int32 array of length L.
        loss_mask: bool array of length L: which tokens are trained. The first is never trained,
            since nothing predicts it.
        per_token: further float32 arrays of length L that follow the tokens, such as advantages.
        value: a number that its row says of it, such as the margin of a pair; 0 where it says none.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)
    value: float = 0.0

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and trained."""
        return int(self.loss_mask[1:].sum())

    def cut(self, length: int) -> Sample:
        """Return its first `length` tokens."""
        per_token = {name: values[:length] for name, values in self.per_token.items()}
        return Sample(self.token_ids[:length], self.loss_mask[:length], per_token, self.value)

    @property
    def targets(self) -> np.ndarray:
        """Places of the tokens that are predicted and trained."""
        return np.flatnonzero(self.loss_mask[1:]) + 1


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass.

    Attributes:
        input_ids_BL, position_ids_BL: tokens and their positions within their sample.
        predict_index_N: places in the flattened rows whose hidden state predicts a target.
        target_ids_N: the predicted tokens.
        sample_index_N: which sample of the step each target belongs to.
        targets_per_sample: targets of each sample, in their order.
        per_token: each of the samples' arrays at the targets, (N,).
        packed_index: where samples lie in a packed row; None for one sample a row.
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
    lengths = [len(sample.token_ids) for sample in chosen]
    row_length = sum(lengths) if pack else max(lengths)
    starts = [sum(lengths[:k]) for k in range(len(lengths))] if pack else [k * row_length for k in range(len(lengths))]
    total = row_length if pack else row_length * len(chosen)
    input_ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    predict, targets, owners = [], [], []
    per_token: dict[str, list[np.ndarray]] = {name: [] for name in chosen[0].per_token}
    for index, sample, start, length in zip(indices, chosen, starts, lengths, strict=True):
        input_ids[start : start + length] = sample.token_ids
        positions[start : start + length] = np.arange(length)
        trained = sample.targets
        predict.append(start + trained - 1)
        targets.append(sample.token_ids[trained])
        owners.append(np.full(len(trained), index))
        for name, values in per_token.items():
            values.append(sample.per_token[name][trained])
    rows = 1 if pack else len(chosen)

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
