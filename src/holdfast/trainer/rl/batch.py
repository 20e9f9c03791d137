"""Turns the rollouts of a batch into samples, and the samples of a step into minibatches and micro-batches.

`Sample.per_token[KEY]` holds one number per token. The constants below list every key and the code that sets it. A
missing key means that this run does not need it; the readers of a key say what replaces it.

A minibatch is one optimizer update, packed and dealt to the ranks. Passes that only measure (log-probabilities before
the step, under the reference, values) use the same plan as the training. Equal rows give equal bits, so a ratio that
should be 1 is 1. The tokens of a step may come from several distributions: environments may set their own temperatures
and cuts.

Shape legend: T targets (trained tokens) of one sample or minibatch, N targets of one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from holdfast.config.algorithm import UpdatesConfig
from holdfast.config.rl_trainer import ATTENDED_TOKENS
from holdfast.errors import DataError
from holdfast.protocol.rollouts import Rollout, Sampling
from holdfast.trainer.data.packing import MicroBatch, Sample, build_micro_batch, plan_rows
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.logprobs import Reading, SamplingByToken

if TYPE_CHECKING:
    from holdfast.trainer.model.packing_check import Layout

SAMPLER_LOGPROB = "sampler_logprob"
"""Log-probability under the sampler when the token was drawn, in nats. Always set, from the rollout."""
SAMPLING = "sampling"
"""Which of the step's distributions the token was sampled from. Not set where all are from one."""
AGE = "age"
"""Versions by which the sampler was older than the weights that the step trains. Always set, from the rollout."""
REFERENCE_LOGPROB = "reference_logprob"
"""Log-probability under the reference, measured before the step, or under a teacher of the orchestrator."""
OLD_LOGPROB = "old_logprob"
"""Log-probability under the trainer's weights before the step. Not set where the only update measures it itself."""
VALUE = "value"
"""The critic's value before the step. Set with a critic."""
RETURN = "return"
"""The critic's target: the return by GAE. Set with a critic."""
ADVANTAGE = "advantage"
"""The advantage. Always set before the updates."""


def assign_targets(sample: Sample, key: str, values_T: Sequence[float] | np.ndarray) -> None:
    """Give every target of a sample its value as `per_token[key]`, 0 elsewhere."""
    sample.per_token[key] = np.zeros(len(sample.token_ids), dtype=np.float32)
    sample.per_token[key][sample.targets] = values_T


def target_values(sample: Sample, key: str) -> np.ndarray:
    """Return the values of `per_token[key]` at the targets, (T,), float64."""
    # float64: sums and means over many tokens keep their digits.
    return sample.per_token[key][sample.targets].astype(np.float64)


def to_samples(rollouts: Sequence[Rollout], *, trained_version: int) -> list[Sample]:
    """Return one sample per rollout, with all its branches: the sampler's log-prob and the version age of each token.

    Age is `trained_version` minus the version that sampled the token. The log-probs of a teacher are those under the
    reference. Raise DataError if a rollout's arrays do not fit together."""
    return [_to_sample(rollout, trained_version) for rollout in rollouts]


def group_rollouts(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each problem, in the order of the batch."""
    return [list(group) for _, group in groupby(rollouts, key=lambda one: (one.environment, one.task_id))]


def without_truncated(samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> list[Sample]:
    """Return the samples, with an empty mask for truncated rollouts; values per token are shared."""
    return [
        replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) if rollout.truncated else sample
        for sample, rollout in zip(samples, rollouts, strict=True)
    ]


def _to_sample(rollout: Rollout, trained_version: int) -> Sample:
    label = f"rollout of {rollout.environment} task {rollout.task_id} sample {rollout.sample_index}"
    length = len(rollout.token_ids)
    reference = rollout.reference_logprobs
    if {len(rollout.loss_mask), len(rollout.logprobs), length if reference is None else len(reference)} != {length}:
        raise DataError(
            f"{label}: {length} tokens, {len(rollout.loss_mask)} mask entries, {len(rollout.logprobs)} "
            f"log-probabilities, {'none' if reference is None else len(reference)} of a teacher; all must be equal"
        )
    loss_mask = np.asarray(rollout.loss_mask, dtype=bool)
    starts = rollout.branch_starts
    if starts[:1] != (0,) or any(not begin < end for begin, end in pairwise([*starts, length])):
        raise DataError(
            f"{label}: its branches begin at {', '.join(map(str, starts)) or 'no token'} of {length}; they must begin "
            "at 0, and each behind the one before"
        )
    if loss_mask[list(starts[1:])].any():
        raise DataError(f"{label}: a branch begins with a sampled token, which no prompt is before")
    ages = np.zeros(length, dtype=np.float32)
    for span in rollout.versions:
        # Per span: a rollout may have been sampled across an update of the weights.
        ages[span.start : span.end] = trained_version - span.version
    teacher = {} if reference is None else {REFERENCE_LOGPROB: np.asarray(reference, dtype=np.float32)}
    return Sample(
        token_ids=np.asarray(rollout.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        per_token={SAMPLER_LOGPROB: np.asarray(rollout.logprobs, dtype=np.float32), AGE: ages, **teacher},
        starts=starts,
    )


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer update.

    Attributes:
        samples: of all ranks.
        micro_batches: this rank's forward passes, as indices into `samples`.
        shares: whether samples of a forward pass share the tokens of their prompt.
    """

    samples: list[Sample]
    micro_batches: list[list[int]]
    shares: bool = False

    @property
    def num_targets(self) -> int:
        """Tokens trained, on all ranks."""
        return sum(sample.num_targets for sample in self.samples)

    def build(self, indices: list[int], *, pack: bool, device: torch.device) -> MicroBatch:
        """Return the micro-batch of one of its forward passes."""
        return build_micro_batch(self.samples, indices, pack=pack, share=self.shares, device=device)


def plan_epochs(
    samples: Sequence[Sample],
    config: UpdatesConfig,
    *,
    row_tokens: int,
    mesh: Mesh,
    seed: int,
    step: int,
    layout: Layout,
) -> list[list[Minibatch]]:
    """Return the minibatches of each epoch; every sample is in one of each epoch.

    With several minibatches the samples are shuffled, again in every epoch, as a function of only seed, step and epoch
    (numpy never changes what its SeedSequence gives)."""
    epochs = []
    for epoch in range(config.epochs):
        order = np.arange(len(samples))
        if config.minibatches > 1:
            # Sorted keys, not Generator.shuffle, whose stream numpy may change between versions.
            keys = np.random.SeedSequence(seed, spawn_key=(step, epoch)).generate_state(len(samples), np.uint64)
            order = np.argsort(keys, kind="stable")
        # Fewer samples than minibatches leave some minibatches empty: they are left out.
        parts = [part for part in np.array_split(order, config.minibatches) if len(part)]
        epochs.append([_plan([samples[index] for index in part], row_tokens, layout, mesh) for part in parts])
    return epochs


def _plan(samples: list[Sample], row_tokens: int, layout: Layout, mesh: Mesh) -> Minibatch:
    if not layout.shares:
        return Minibatch(samples, plan_micro_batches(samples, row_tokens=row_tokens, layout=layout, mesh=mesh))
    shared = plan_shared_prompts(samples, row_tokens=row_tokens, layout=layout, num_ranks=mesh.data_size)
    return Minibatch(samples, shared[mesh.data_rank], shares=True)


_PASSES_OF_A_ROW = 16
"""Passes of nothing that take as long as one full row: parameters are gathered, and kernels started."""


def plan_shared_prompts(
    samples: Sequence[Sample], *, row_tokens: int, layout: Layout, num_ranks: int
) -> list[list[list[int]]]:
    """Return each rank's micro-batches, as indices into `samples`; samples of one prompt are neighbours that share it.

    Answers of one prompt stay together as far as that pays. Whole groups fill rows worse than parts of them do, and
    keep ranks less equally busy. Each group is divided into parts of the size by which all rounds take the least time.
    """
    by_prompt: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.shared_prompt or index, []).append(index)
    most = max(map(len, by_prompt.values()))
    plans = []
    for size in (most >> halvings for halvings in range(most.bit_length())):
        parts = [part for group in by_prompt.values() for part in _parts(samples, group, size, row_tokens)]
        costs = [_shared_cost(samples, part, layout) for part in parts]
        plan = plan_rows(
            [_room(samples, part) for part in parts],
            costs=costs,
            arrangement="packed",
            budget=row_tokens,
            rows_per_micro_batch=1,
            world_size=num_ranks,
        )
        rounds = [max(sum(costs[part] for part in row) for row in rows) for rows in zip(*plan, strict=True)]
        time = sum(rounds) + len(rounds) * row_tokens / _PASSES_OF_A_ROW
        # Sorted: two parts of one group in a row become neighbours.
        plans.append(
            (time, [[[index for part in sorted(row) for index in parts[part]] for row in rank] for rank in plan])
        )
    return min(plans, key=lambda found: found[0])[1]


def _parts(samples: Sequence[Sample], group: list[int], most: int, row_tokens: int) -> list[list[int]]:
    """Return the samples of one prompt in parts of at most `most` samples, which fit a row if they have two."""
    parts: list[list[int]] = []
    for index in group:
        if not parts or len(parts[-1]) == most or _room(samples, [*parts[-1], index]) > row_tokens:
            parts.append([])
        parts[-1].append(index)
    return parts


def _room(samples: Sequence[Sample], part: list[int]) -> int:
    """Return what a part takes of a row's budget: its tokens, or what attention holds of them, if that is more."""
    attended = sum(len(samples[index].token_ids) for index in part)
    return max(_shared_tokens(samples, part), -(-attended // ATTENDED_TOKENS))


def _shared_tokens(samples: Sequence[Sample], part: list[int]) -> int:
    tokens = sum(len(samples[index].token_ids) - sum(samples[index].stems) for index in part)
    return tokens - (len(part) - 1) * samples[part[0]].prompt_length


def _shared_cost(samples: Sequence[Sample], part: list[int], layout: Layout) -> float:
    stems = [stem for index in part for stem in samples[index].stems]
    shared = [*stems, *[samples[part[0]].prompt_length] * (len(part) - 1)]  # attends to itself once
    pairs = sum(length**2 for index in part for length in samples[index].lengths) - sum(stem**2 for stem in shared)
    return _shared_tokens(samples, part) + layout.pair_cost * pairs


def plan_micro_batches(samples: Sequence[Sample], *, row_tokens: int, layout: Layout, mesh: Mesh) -> list[list[int]]:
    """Return this rank's micro-batches, as indices into `samples`. All sequences of a sample are in one micro-batch.
    `row_tokens`: most tokens of a micro-batch; a longer sample has one for itself."""
    arrangement = layout.arrangement(pack=True)
    lengths = [len(sample.token_ids) for sample in samples]
    if arrangement == "grouped":
        # Each sequence is a row, padded to the longest. Several get a batch of their own: their size beside others is
        # not known.
        lengths = [
            max(row_tokens, len(sample.starts) * max(sample.lengths)) if len(sample.starts) > 1 else length
            for sample, length in zip(samples, lengths, strict=True)
        ]
    plan = plan_rows(
        lengths,
        costs=[sum(map(layout.cost, sample.lengths)) for sample in samples],
        arrangement=arrangement,
        budget=row_tokens,
        rows_per_micro_batch=1,
        world_size=mesh.data_size,
    )
    return plan[mesh.data_rank]


@torch.no_grad()
def measure_targets(
    name: str, forward: Callable[[MicroBatch], Tensor], minibatches: Sequence[Minibatch], mesh: Mesh, *, pack: bool
) -> None:
    """Give every sample what `forward` says about its targets, as `per_token[name]`, 0 elsewhere. Collective.

    Args:
        forward: from the micro-batch to one number per target, (N,).
        pack: whether the samples of a micro-batch share a row.
    """
    for minibatch in minibatches:
        counts = [sample.num_targets for sample in minibatch.samples]
        ends = np.cumsum(counts)
        found_T = torch.zeros(int(ends[-1]), dtype=torch.float32)
        passes = [
            forward(minibatch.build(indices, pack=pack, device=mesh.device)).float()
            for indices in minibatch.micro_batches
        ]
        order = [index for indices in minibatch.micro_batches for index in indices]
        # To the CPU in one copy, after all passes: each waits for the device.
        values_N = torch.cat(passes).cpu()
        for index, part_N in zip(order, values_N.split([counts[index] for index in order]), strict=True):
            found_T[ends[index] - counts[index] : ends[index]] = part_N
        # Every target is one rank's; the others add zero, which changes no bit.
        parts = np.split(mesh.sum_tensor(found_T).numpy(), ends[:-1])
        for sample, part_T in zip(minibatch.samples, parts, strict=True):
            assign_targets(sample, name, part_T)


def learned_distributions(
    rollouts: Sequence[Rollout], samples: Sequence[Sample], *, is_imitation: bool
) -> Sampling | SamplingByToken:
    """Return the one distribution of all rollouts; else all of them, and give every sample which one is its own.

    Args:
        samples: of the rollouts.
        is_imitation: a teacher sampled them. Tokens that it never samples must become unlikely, so nothing is cut.
    """
    samplings = [rollout.sampling.whole() if is_imitation else rollout.sampling.distribution for rollout in rollouts]
    table = tuple(dict.fromkeys(samplings))  # in the order of the rollouts, the same on every rank
    if len(table) == 1:
        return table[0]
    for sample, sampling in zip(samples, samplings, strict=True):
        sample.per_token[SAMPLING] = np.full(len(sample.token_ids), table.index(sampling), dtype=np.float32)
    return SamplingByToken(table)


def reading_of(micro: MicroBatch, reading: Reading) -> Reading:
    """Return the reading of the targets of a micro-batch."""
    if isinstance(reading.sampling, Sampling):
        return reading
    return replace(reading, sampling=replace(reading.sampling, index_N=micro.per_token[SAMPLING].long()))
