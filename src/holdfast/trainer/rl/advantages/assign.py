"""Gives the tokens of samples their advantages: one of a whole rollout, one of each token, or those of a critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from holdfast.shared.config.algorithm import CriticConfig
from holdfast.shared.errors import DataError
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.advantages.base import AdvantageValue, whiten
from holdfast.trainer.rl.advantages.gae import generalized_advantages
from holdfast.trainer.rl.advantages.scored_rollouts import Groups
from holdfast.trainer.rl.batches.per_token import (
    ADVANTAGE,
    OLD_LOGPROB,
    REFERENCE_LOGPROB,
    RETURN,
    VALUE,
    assign_targets,
    target_values,
)


def assign_advantages(samples: Sequence[Sample], advantages_PG: Sequence[Sequence[AdvantageValue]]) -> None:
    """Give every token of a sample the advantage of its rollout, or each target its own."""
    for sample, value in zip(samples, chain.from_iterable(advantages_PG), strict=True):
        if isinstance(value, int | float):
            sample.per_token[ADVANTAGE] = np.full(len(sample.token_ids), value, dtype=np.float32)
        else:
            assign_targets(sample, ADVANTAGE, value)


def assign_gae_advantages(samples: Sequence[Sample], rollouts_PG: Groups, config: CriticConfig) -> None:
    """Give every target its advantage and return by GAE: penalties at each token, the reward at the last one.

    As in Ouyang et al. 2022, "Training language models to follow instructions with human feedback".
    """
    for sample, rollout in zip(samples, chain.from_iterable(rollouts_PG), strict=True):
        advantages_T, returns_T = generalized_advantages(
            torch.from_numpy(rollout.token_rewards.copy()),
            torch.from_numpy(target_values(sample, VALUE)),
            gamma=config.gamma,
            lam=config.lam,
        )
        assign_targets(sample, ADVANTAGE, advantages_T.numpy())
        assign_targets(sample, RETURN, returns_T.numpy())


def whiten_advantages(samples: Sequence[Sample]) -> None:
    """Bring the advantages of all targets to mean 0 and variance 1, see `whiten`; a single one stays as it is."""
    found = [target_values(sample, ADVANTAGE) for sample in samples]
    if sum(map(len, found)) < 2:
        return
    for sample, whitened_T in zip(samples, whiten(found), strict=True):
        assign_targets(sample, ADVANTAGE, whitened_T)


def add_distillation(samples: Sequence[Sample], coef: float) -> dict[str, float]:
    """Add `coef (log teacher - log policy)` to the advantage of every target; return a metric.

    The policy is that before the step. The policy gradient with this advantage lowers KL(policy || teacher) token by
    token (Gu et al. 2024, "MiniLLM"; Agarwal et al. 2024, "On-Policy Distillation of Language Models"; without their
    corrections for later tokens).

    Returns:
        `distillation/kl`: the mean over the targets of `log policy - log teacher`, which estimates that divergence.

    Raises:
        DataError: there are no log-probabilities of a teacher.
    """
    divergences = [0.0]
    for sample in samples:
        if REFERENCE_LOGPROB not in sample.per_token:
            raise DataError(
                "trainer.distillation (and trainer.advantage = 'distillation') needs the log-probabilities of a "
                "teacher, and the batch has none: set orchestrator.teacher with mode = 'logprobs', or "
                "trainer.kl.reference"
            )
        divergence_T = target_values(sample, OLD_LOGPROB) - target_values(sample, REFERENCE_LOGPROB)
        assign_targets(sample, ADVANTAGE, target_values(sample, ADVANTAGE) - coef * divergence_T)
        divergences += divergence_T.tolist()
    return {"distillation/kl": math.fsum(divergences) / max(1, len(divergences) - 1)}


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean, population std and largest magnitude over the trained tokens."""
    found = np.concatenate([target_values(sample, ADVANTAGE) for sample in samples])
    if not len(found):
        return {}
    return {
        "advantage/mean": float(found.mean()),
        "advantage/std": float(found.std()),
        "advantage/max_abs": float(np.abs(found).max()),
    }
