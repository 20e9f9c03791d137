"""From the rollouts of a batch to training samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from holdfast.shared.errors import DataError
from holdfast.shared.wire.rollouts import Rollout
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.batches.per_token import AGE, REFERENCE_LOGPROB, SAMPLER_LOGPROB


def to_samples(rollouts: Sequence[Rollout], *, trained_version: int) -> list[Sample]:
    """Return one sample per rollout, with all its branches: the sampler's log-prob and the version age of each token.

    Age is `trained_version` minus the version that sampled the token. The log-probs of a teacher are those
    under the reference, where there are some.

    Raises:
        DataError: a rollout's arrays do not fit together.
    """
    return [_to_sample(rollout, trained_version) for rollout in rollouts]


def group_rollouts(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each problem, in the order of the batch."""
    return [list(group) for _, group in groupby(rollouts, key=lambda one: (one.environment, one.task_id))]


def without_truncated(samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> list[Sample]:
    """Return the samples, with an empty mask for those of truncated rollouts; what follows the tokens is shared."""
    return [
        replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) if rollout.truncated else sample
        for sample, rollout in zip(samples, rollouts, strict=True)
    ]


def _to_sample(rollout: Rollout, trained_version: int) -> Sample:
    length = len(rollout.token_ids)
    reference = rollout.reference_logprobs
    if {len(rollout.loss_mask), len(rollout.logprobs), length if reference is None else len(reference)} != {length}:
        raise DataError(
            f"rollout of {rollout.environment} task {rollout.task_id} sample {rollout.sample_index}: {length} tokens, "
            f"{len(rollout.loss_mask)} mask entries, {len(rollout.logprobs)} log-probabilities, "
            f"{'none' if reference is None else len(reference)} of a teacher; all must be equal"
        )
    loss_mask = np.asarray(rollout.loss_mask, dtype=bool)
    starts = rollout.branch_starts
    if starts[:1] != (0,) or any(not begin < end for begin, end in pairwise([*starts, length])):
        raise DataError(
            f"rollout of {rollout.environment} task {rollout.task_id} sample {rollout.sample_index}: its branches "
            f"begin at {', '.join(map(str, starts)) or 'no token'} of {length}; they must begin at 0, and each behind "
            "the one before"
        )
    if loss_mask[list(starts[1:])].any():
        raise DataError(
            f"rollout of {rollout.environment} task {rollout.task_id} sample {rollout.sample_index}: a branch begins "
            "with a sampled token, which no prompt is before"
        )
    ages = np.zeros(length, dtype=np.float32)
    for span in rollout.versions:
        # Per span: a rollout may have been sampled across an update of the weights.
        ages[span.start : span.end] = trained_version - span.version
    teacher = {} if reference is None else {REFERENCE_LOGPROB: np.asarray(reference, dtype=np.float32)}
    return Sample(
        token_ids=np.asarray(rollout.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        per_token={
            SAMPLER_LOGPROB: np.asarray(rollout.logprobs, dtype=np.float32),
            AGE: ages,
            **teacher,
        },
        starts=starts,
    )
