"""Packing: decides which samples share a micro-batch on which rank, and builds the tensors of one forward pass.

Every rank computes the same plan from the same samples, so ranks need no messages. Every forward pass is a collective,
so ranks work in rounds of one micro-batch each, and a round takes as long as its costliest micro-batch. The plan has as
few rounds as the token budget allows, and balances the cost of samples over all micro-batches.

Samples may share a prompt: answers of one group that follow one another in a packed row. The prompt's tokens are in the
row once, before the first answer. Each answer attends to the prompt and to itself, and its positions continue the
prompt's, so it is computed as in a row of its own. The branches of an episode share their first tokens likewise.

Shape legend: B rows, L tokens of a row, N predicted tokens of the micro-batch; a packed row: T tokens; a padded batch
of its sequences: S sequences, L tokens of the longest, P tokens of the prompt that all of them share; E tokens of all
sequences of a row, shared tokens once for each sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.trainer.data.rows import Sample as Sample

SHORT = 64
"""Tokens up to which samples share a padded batch, however short they are, and are queries again with a prompt that
they share: a call would cost more than the padding."""
_FILLED = 0.75
"""The least share of its row that a longer sample fills: a higher one means more calls, a lower one more padding."""


@dataclass(frozen=True)
class PackedIndex:
    """Places of the sequences of a packed row, and how they become padded batches of about the same length.

    A sequence has tokens of its own, which attend. It may begin with tokens of an earlier sequence, which its own
    tokens see.

    Attributes:
        gather_SL: of each padded batch, for each of its places, the token of the row that attends (0 for padding).
        prefix_P: of each padded batch, the tokens that all of its sequences see before those; empty if there are none.
        scatter_T: for each token of the row, its place in the padded batches, flattened one after the other.
        cu_seqlens: borders of the sequences' own tokens in the row, one more than there are sequences, int32.
        max_len: tokens of the longest sequence.
        seen_E: the tokens that each sequence sees, one sequence after the other; None: only its own.
        cu_seqlens_seen: borders of the sequences in `seen_E`, int32; equal to `cu_seqlens` if that is None.
    """

    gather_SL: tuple[Tensor, ...]
    prefix_P: tuple[Tensor, ...]
    scatter_T: Tensor
    cu_seqlens: Tensor
    max_len: int
    seen_E: Tensor | None
    cu_seqlens_seen: Tensor

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device) -> PackedIndex:
        """Return the index of a row that holds sequences of these lengths in this order."""
        borders = np.cumsum([0, *lengths])
        return cls.from_sequences([np.arange(begin, end) for begin, end in pairwise(borders)], device=device)

    @classmethod
    def from_sequences(cls, sequences: Sequence[np.ndarray], *, device: torch.device) -> PackedIndex:
        """Return the index of a row whose sequences hold these tokens of it.

        The first tokens of a sequence may belong to an earlier sequence; the others follow in the row's order."""
        lengths = [len(tokens) for tokens in sequences]
        borders = [0, *(int(tokens[-1]) + 1 for tokens in sequences)]
        prefixes = [length - own for length, own in zip(lengths, np.diff(borders), strict=True)]
        is_shared = any(prefixes)
        prefixes = [prefix if prefix > SHORT else 0 for prefix in prefixes]
        by_prefix: dict[bytes, list[int]] = {}
        for member, tokens in enumerate(sequences):
            by_prefix.setdefault(tokens[: prefixes[member]].tobytes(), []).append(member)
        gather_SL, prefix_P, scatter_T, places = [], [], np.empty(borders[-1], dtype=np.int64), 0
        for prefix, sharing in by_prefix.items():
            attending = [sequences[member][prefixes[member] :] for member in sharing]
            for batch in _by_length([len(tokens) for tokens in attending]):
                lengths_S = np.array([len(attending[place]) for place in batch])
                valid_SL = np.arange(lengths_S.max()) < lengths_S[:, None]
                tokens_SL = np.zeros(valid_SL.shape, dtype=np.int64)
                tokens_SL[valid_SL] = np.concatenate([attending[place] for place in batch])
                scatter_T[tokens_SL[valid_SL]] = places + np.flatnonzero(valid_SL)
                gather_SL.append(to_device(torch.from_numpy(tokens_SL), device))
                prefix_P.append(to_device(torch.from_numpy(np.frombuffer(prefix, dtype=np.int64).copy()), device))
                places += valid_SL.size

        def on_device(borders: Sequence[int]) -> Tensor:
            return to_device(torch.tensor(borders, dtype=torch.int32), device)

        cu_seqlens = on_device(borders)
        return cls(
            gather_SL=tuple(gather_SL),
            prefix_P=tuple(prefix_P),
            scatter_T=to_device(torch.from_numpy(scatter_T), device),
            cu_seqlens=cu_seqlens,
            max_len=max(lengths),
            seen_E=to_device(torch.from_numpy(np.concatenate(sequences)), device) if is_shared else None,
            cu_seqlens_seen=on_device(np.cumsum([0, *lengths]).tolist()) if is_shared else cu_seqlens,
        )


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return which samples are in which padded batch: the longest first, and in the order of the row within one."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (longest <= SHORT or lengths[index] >= _FILLED * longest):
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
    return tensor.pin_memory().to(device, non_blocking=True)


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
        packed_index: where sequences are in a packed row; None for one sequence a row.
        largest_id: of the tokens.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    predict_index_N: Tensor
    target_ids_N: Tensor
    sample_index_N: Tensor
    targets_per_sample: tuple[int, ...]
    per_token: dict[str, Tensor]
    packed_index: PackedIndex | None
    largest_id: int


def build_micro_batch(
    samples: Sequence[Sample], indices: list[int], *, pack: bool, device: torch.device, share: bool = False
) -> MicroBatch:
    """Return the micro-batch of these samples; with no samples, it trains on nothing. `share`: whether neighbours with
    the same prompt share its tokens, in a packed row, and branches their first."""
    if not indices:
        return _empty(samples[0], pack, device)
    chosen = [samples[index] for index in indices]
    sequences = _sequences(chosen, pack=pack, share=share)
    rows = 1 if pack else len(sequences)
    total = max(int(tokens[-1]) for tokens in sequences) + 1
    row_length = total if pack else max(map(len, sequences))
    input_ids = np.zeros(rows * row_length, dtype=np.int64)
    positions = np.zeros(rows * row_length, dtype=np.int64)
    predict, targets, owners = [], [], []
    per_token: dict[str, list[np.ndarray]] = {name: [] for name in chosen[0].per_token}
    remaining = iter(sequences)
    for index, sample in zip(indices, chosen, strict=True):
        own = list(islice(remaining, len(sample.starts)))
        places = np.concatenate(own)
        input_ids[places] = sample.token_ids
        positions[places] = np.concatenate([np.arange(len(tokens)) for tokens in own])
        trained = sample.targets
        # The first of a sequence is not a target, so the token before is one of the same sequence.
        predict.append(places[trained - 1])
        targets.append(sample.token_ids[trained])
        owners.append(np.full(len(trained), index))
        for name, values in per_token.items():
            values.append(sample.per_token[name][trained])

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
        packed_index=PackedIndex.from_sequences(sequences, device=device) if pack else None,
        largest_id=int(input_ids.max()),
    )


def _sequences(samples: Sequence[Sample], *, pack: bool, share: bool) -> list[np.ndarray]:
    """Return the places of each sequence's tokens in the flattened rows."""
    if not pack:
        lengths = [length for sample in samples for length in sample.lengths]
        return [np.arange(length) + row * max(lengths) for row, length in enumerate(lengths)]
    found: list[np.ndarray] = []
    used, before, prompt_places = 0, b"", np.arange(0)
    for sample in samples:
        prompt = sample.shared_prompt if share else b""
        kept = prompt_places if prompt and prompt == before else np.arange(0)
        for number, length in enumerate(sample.lengths):
            if share and number:
                kept = found[-1][: sample.stems[number]]
            found.append(np.concatenate([kept, np.arange(used, used + length - len(kept))]))
            used += length - len(kept)
        before, prompt_places = prompt, found[-len(sample.starts)][: sample.prompt_length]
    return found


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
        largest_id=0,
    )


Arrangement = Literal["packed", "grouped", "rows"]
"""How samples become micro-batches: `packed` into one row up to a budget of tokens. `grouped`: one a row, up to the
same budget with the padding counted, for models whose tokens meet outside of attention. Or given numbers of `rows`, in
the order of the data."""


def plan_rows(
    lengths: Sequence[int],
    *,
    costs: Sequence[float] | None = None,
    arrangement: Arrangement,
    budget: int,
    rows_per_micro_batch: int,
    world_size: int,
) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches as lists of sample indices.

    Every rank gets the same number of micro-batches, as few as the budget allows; some of the last round may be
    empty. One rank fills rows as full as they get: costs do not matter there.

    Args:
        lengths: tokens of each sample; for `grouped`, of its row.
        costs: what each sample takes, in any unit, such as the unit of `Layout.cost`; unset: its length.
        budget: most tokens of a micro-batch, for `packed` and `grouped`; a longer sample has one for itself.
        rows_per_micro_batch: most samples of a micro-batch, for `rows`.
        world_size: ranks that train different samples.
    """
    costs = lengths if costs is None else costs
    if arrangement == "packed":
        groups = _packed(lengths, costs, budget, world_size)
    elif arrangement == "grouped":
        groups = _grouped(lengths, budget, world_size)
    else:
        groups = _in_order(len(lengths), rows_per_micro_batch, world_size)
    if world_size > 1:
        together = sum if arrangement == "packed" else lambda costs: len(costs) * max(costs)  # padded
        groups.sort(key=lambda group: -together([costs[index] for index in group]))  # equals keep their order
    return _dealt(groups, world_size)


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of samples grouped into rows of at most `budget` tokens.

    First-fit decreasing (Johnson 1973): at most 11/9 of the optimal number of rows. A sample longer
    than the budget gets a row of its own."""
    rows: list[list[int]] = []
    # A binary tree of the most room below each node: the first row with enough is found in log(samples) steps.
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [budget] * (2 * leaves)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = min(lengths[index], budget)
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def group_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of samples in groups whose number times the longest is at most `budget`, the longest first.

    A sample longer than the budget gets a group of its own."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * longest <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def spread_by_cost(
    lengths: Sequence[int], costs: Sequence[float], budget: int, num_rows: int
) -> list[list[int]] | None:
    """Return indices of samples in `num_rows` rows of nearly equal cost and at most `budget` tokens.

    Longest processing time first (Graham 1969): the costliest sample goes to the row that has cost least so far and
    has room. None if no row has room for a sample."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    cheapest = [(0.0, row) for row in range(num_rows)]
    room = [budget] * num_rows
    shortest = min(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        passed = []
        while cheapest and room[cheapest[0][1]] < lengths[index]:
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, row = heapq.heappop(cheapest)
        rows[row].append(index)
        room[row] -= lengths[index]
        for entry in (*passed, (cost + costs[index], row)):
            if room[entry[1]] >= shortest:
                heapq.heappush(cheapest, entry)
    return rows


def _packed(lengths: Sequence[int], costs: Sequence[float], budget: int, world_size: int) -> list[list[int]]:
    lengths = [min(length, budget) for length in lengths]  # what is longer fills a row
    fullest = first_fit_decreasing(lengths, budget)
    if world_size == 1:
        return fullest
    # If the rows are nearly full anyway, no spreading by cost may fit, and it gains little.
    return spread_by_cost(lengths, costs, budget, _places(len(fullest), len(lengths), world_size)) or fullest


def _grouped(lengths: Sequence[int], budget: int, world_size: int) -> list[list[int]]:
    groups = group_by_length(lengths, budget)
    if world_size == 1:
        return groups
    places = _places(len(groups), len(lengths), world_size)
    # The smallest budget that needs no more groups than there are places makes the most even ones.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(group_by_length(lengths, middle)) <= places:
            high = middle
        else:
            low = middle + 1
    return group_by_length(lengths, high)


def _in_order(num_samples: int, most: int, world_size: int) -> list[list[int]]:
    if world_size == 1:
        return [list(range(start, min(start + most, num_samples))) for start in range(0, num_samples, most)]
    places = _places(-(-num_samples // most), num_samples, world_size)
    borders = [place * num_samples // places for place in range(places + 1)]
    return [list(range(start, end)) for start, end in pairwise(borders)]


def _places(num_groups: int, num_samples: int, world_size: int) -> int:
    """Return how many micro-batches there are on all ranks in as many rounds as `num_groups` need."""
    return min(-(-num_groups // world_size) * world_size, num_samples)


def _dealt(groups: list[list[int]], world_size: int) -> list[list[list[int]]]:
    """Return each rank's groups, round by round; in the last round some may have none."""
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    for number, group in enumerate(groups):
        ranks[number % world_size].append(group)
    longest = max(len(rank) for rank in ranks)
    return [rank + [[]] * (longest - len(rank)) for rank in ranks]
