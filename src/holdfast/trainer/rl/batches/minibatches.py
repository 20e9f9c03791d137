"""A step's samples as minibatches: one optimizer update each, packed and dealt to the ranks.

The same plan serves the passes that only measure (log-probabilities before the step, under the
reference, values) and the training: equal rows give equal bits, so a ratio that should be 1 is 1.

Shape legend: T targets of a minibatch, N those of one forward pass, K names of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.shared.config.algorithm import UpdatesConfig
from holdfast.trainer.data.packing import MicroBatch, Sample, build_micro_batch
from holdfast.trainer.data.row_plan import plan_rows
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.layout import Layout


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer update trains on.

    Attributes:
        samples: of all ranks.
        micro_batches: this rank's forward passes, as indices into `samples`.
    """

    samples: list[Sample]
    micro_batches: list[list[int]]

    @property
    def num_targets(self) -> int:
        """Tokens trained, on all ranks."""
        return sum(sample.num_targets for sample in self.samples)


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

    With several minibatches the samples are shuffled, anew in every epoch, as a function of seed, step
    and epoch alone (numpy never changes what its SeedSequence gives).
    """
    epochs = []
    for epoch in range(config.epochs):
        order = np.arange(len(samples))
        if config.minibatches > 1:
            # Sorted keys, not Generator.shuffle, whose stream numpy may change between versions.
            keys = np.random.SeedSequence(seed, spawn_key=(step, epoch)).generate_state(len(samples), np.uint64)
            order = np.argsort(keys, kind="stable")
        # Fewer samples than minibatches leave some empty: an update of nothing is none.
        parts = [part for part in np.array_split(order, config.minibatches) if len(part)]
        epochs.append([_plan([samples[index] for index in part], row_tokens, layout, mesh) for part in parts])
    return epochs


def _plan(samples: list[Sample], row_tokens: int, layout: Layout, mesh: Mesh) -> Minibatch:
    return Minibatch(samples, plan_micro_batches(samples, row_tokens=row_tokens, layout=layout, mesh=mesh))


def plan_micro_batches(samples: Sequence[Sample], *, row_tokens: int, layout: Layout, mesh: Mesh) -> list[list[int]]:
    """Return this rank's micro-batches, as indices into `samples`. All sequences of a sample are in one of them.

    Args:
        row_tokens: most tokens of a micro-batch; a longer sample is alone.
    """
    arrangement = layout.arrangement(pack=True)
    lengths = [len(sample.token_ids) for sample in samples]
    if arrangement == "grouped":
        # Each sequence is a row, padded to the longest. Several are alone: what they take beside others is not known.
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
    names: Sequence[str],
    forward: Callable[[MicroBatch], Sequence[Tensor]],
    minibatches: Sequence[Minibatch],
    mesh: Mesh,
    *,
    pack: bool,
) -> None:
    """Give every sample what `forward` says about its targets, as `per_token` of those names, 0 elsewhere. Collective.

    Args:
        forward: from the micro-batch to one number per target, (N,), for each name.
        pack: whether the samples of a micro-batch share a row.
    """
    for minibatch in minibatches:
        counts = [sample.num_targets for sample in minibatch.samples]
        ends = np.cumsum(counts)
        found_KT = torch.zeros(len(names), int(ends[-1]), dtype=torch.float32)
        passes = list[Tensor]()
        for indices in minibatch.micro_batches:
            micro = build_micro_batch(minibatch.samples, indices, pack=pack, device=mesh.device)
            passes.append(torch.stack([values_N.float() for values_N in forward(micro)]))
        order = [index for indices in minibatch.micro_batches for index in indices]
        # To the CPU in one copy, behind all passes: each waits for the device.
        values_KN = torch.cat(passes, 1).cpu()
        for index, part_KN in zip(order, values_KN.split([counts[index] for index in order], 1), strict=True):
            found_KT[:, ends[index] - counts[index] : ends[index]] = part_KN
        # Every target is one rank's; the others add zero, which changes no bit.
        parts = np.split(mesh.sum_tensor(found_KT).numpy(), ends[:-1], axis=1)
        for sample, part_KT in zip(minibatch.samples, parts, strict=True):
            for name, part_T in zip(names, part_KT, strict=True):
                sample.per_token[name] = np.zeros(len(sample.token_ids), dtype=np.float32)
                sample.per_token[name][sample.targets] = part_T
