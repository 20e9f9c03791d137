"""The distributions that a step's tokens were sampled from, which the step changes: one, or several in a mix.

Environments may sample at temperatures, and with cuts, of their own, and what is replayed was sampled as its batch was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from holdfast.shared.wire.rollouts import Rollout
from holdfast.shared.wire.sampling import Sampling
from holdfast.trainer.data.packing import MicroBatch, Sample
from holdfast.trainer.models.logprobs import Reading
from holdfast.trainer.models.truncation import SamplingByToken
from holdfast.trainer.rl.batches.per_token import SAMPLING


def learned_distributions(
    rollouts: Sequence[Rollout], samples: Sequence[Sample], *, is_imitation: bool
) -> Sampling | SamplingByToken:
    """Return the one distribution of all rollouts; else all of them, and give every sample which one is its own.

    Args:
        samples: of the rollouts.
        is_imitation: a teacher sampled them. What it never samples must become unlikely, so nothing is cut.
    """
    samplings = [rollout.sampling.whole() if is_imitation else rollout.sampling for rollout in rollouts]
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
