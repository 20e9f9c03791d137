"""The arrays that RL gives its samples, one number per token, as `Sample.per_token[KEY]`: every key and who sets it.

A key that is not set means that nothing of this run needs it; those who read it say what stands in then.

Shape legend: T targets (trained tokens) of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.trainer.data.packing import Sample

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
"""The critic's value before the step; where there is a critic."""
RETURN = "return"
"""What the critic learns: the return by GAE; where there is a critic."""
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
