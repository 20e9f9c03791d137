"""From the orchestrator's batches to training samples."""

from __future__ import annotations

import numpy as np

from trainer.packing import Sample
from triad.errors import DataError
from triad.messages import Batch, Rollout

ADVANTAGE = "advantage"
SAMPLER_LOGPROB = "sampler_logprob"
WEIGHT = "weight"
AGE = "age"


def to_samples(batch: Batch, *, trained_version: int) -> list[Sample]:
    """Return one sample per rollout, with per-token advantage, sampler log-prob, weight and version age.

    The weight of a token is 1 / (number of rollouts * sampled tokens of its rollout), so all weights
    of the step sum to 1. Age is `trained_version` minus the version that sampled the token.

    Raises:
        DataError: a rollout's arrays do not fit together.
    """
    return [_to_sample(rollout, len(batch.rollouts), trained_version) for rollout in batch.rollouts]


def _to_sample(rollout: Rollout, num_rollouts: int, trained_version: int) -> Sample:
    length = len(rollout.token_ids)
    if len(rollout.loss_mask) != length or len(rollout.logprobs) != length:
        raise DataError(
            f"rollout of {rollout.environment} task {rollout.task_id} sample {rollout.sample_index}: {length} tokens, "
            f"{len(rollout.loss_mask)} mask entries, {len(rollout.logprobs)} log-probabilities; all must be equal"
        )
    loss_mask = np.asarray(rollout.loss_mask, dtype=bool)
    sampled = max(1, int(loss_mask[1:].sum()))
    ages = np.zeros(length, dtype=np.float32)
    for span in rollout.versions:
        ages[span.start : span.end] = trained_version - span.version
    return Sample(
        token_ids=np.asarray(rollout.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        per_token={
            ADVANTAGE: np.full(length, rollout.advantage, dtype=np.float32),
            SAMPLER_LOGPROB: np.asarray(rollout.logprobs, dtype=np.float32),
            WEIGHT: np.full(length, 1 / (num_rollouts * sampled), dtype=np.float32),
            AGE: ages,
        },
    )
