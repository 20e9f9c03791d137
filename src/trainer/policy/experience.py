"""What a batch of rollouts says about the policy: rewards, penalties and, from them, the advantage of every token.

    rewards of the environments -> reward model -> length penalty, clip, scale -> KL penalty -> advantages

All ranks see all rollouts and measurements, so all compute the same.

Shape legend: P problems, G rollouts of one problem, T trained tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from trainer.packing import Sample
from trainer.policy.advantage import BatchAdvantage
from trainer.policy.gae import generalized_advantages
from trainer.policy.kl import KlEstimator, estimate_kl
from trainer.policy.rollouts import ADVANTAGE, OLD_LOGPROB, REFERENCE_LOGPROB, RETURN, VALUE, assign_advantages
from triad.config.algorithm import CriticConfig
from triad.errors import DataError


@dataclass(frozen=True)
class Penalty:
    """The KL penalty of rewards: `coef` times the estimate, subtracted at each token."""

    coef: float
    estimator: KlEstimator

    def of(self, sample: Sample) -> np.ndarray:
        """Return the penalty of each target, (T,), float64."""
        old_T, reference_T = _targets(sample, OLD_LOGPROB), _targets(sample, REFERENCE_LOGPROB)
        return self.coef * estimate_kl(old_T, reference_T, self.estimator).numpy()


def kl_of_sequences(samples: Sequence[Sample]) -> list[float]:
    """Return, for each sample, k1 against the reference before the step, summed over its targets, in nats."""
    return [
        math.fsum((_targets(sample, OLD_LOGPROB) - _targets(sample, REFERENCE_LOGPROB)).tolist()) for sample in samples
    ]


def group_advantages(
    samples: Sequence[Sample], rewards_PG: Sequence[Sequence[float]], advantage: BatchAdvantage, penalty: Penalty | None
) -> None:
    """Give every sample its `advantage`, of its reward less the sum of its penalties."""
    sums = iter([math.fsum(penalty.of(sample).tolist()) if penalty else 0.0 for sample in samples])
    penalised_PG = [[reward - next(sums) for reward in rewards_G] for rewards_G in rewards_PG]
    assign_advantages(samples, advantage(penalised_PG))


def critic_advantages(
    samples: Sequence[Sample], rewards_PG: Sequence[Sequence[float]], config: CriticConfig, penalty: Penalty | None
) -> None:
    """Give every target its advantage and return by GAE: penalties at each token, the reward at the last one.

    As in Ouyang et al. 2022, "Training language models to follow instructions with human feedback".
    """
    for sample, reward in zip(samples, chain.from_iterable(rewards_PG), strict=True):
        rewards_T = -torch.from_numpy(penalty.of(sample)) if penalty else torch.zeros(sample.num_targets).double()
        if sample.num_targets:
            rewards_T[-1] += reward
        advantages_T, returns_T = generalized_advantages(
            rewards_T, _targets(sample, VALUE), gamma=config.gamma, lam=config.lam
        )
        _give(sample, ADVANTAGE, advantages_T.numpy())
        _give(sample, RETURN, returns_T.numpy())
    if config.whiten:
        _whiten(samples)


def distillation_advantages(samples: Sequence[Sample]) -> None:
    """Give every target `log teacher - log policy`, the policy's being that before the step.

    The policy gradient with it lowers KL(policy || teacher) token by token (Gu et al. 2024, "MiniLLM"; Agarwal et
    al. 2024, "On-Policy Distillation of Language Models"; without their corrections for later tokens).

    Raises:
        DataError: there are no log-probabilities of a teacher.
    """
    for sample in samples:
        if REFERENCE_LOGPROB not in sample.per_token:
            raise DataError(
                "advantage = 'distillation' needs the log-probabilities of a teacher, and the batch has none: set "
                "orchestrator.teacher with mode = 'logprobs', or trainer.kl.reference"
            )
        _give(sample, ADVANTAGE, (_targets(sample, REFERENCE_LOGPROB) - _targets(sample, OLD_LOGPROB)).numpy())


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean, population std and largest magnitude over the trained tokens."""
    found = np.concatenate([sample.per_token[ADVANTAGE][sample.targets].astype(np.float64) for sample in samples])
    if not len(found):
        return {}
    return {
        "advantage/mean": float(found.mean()),
        "advantage/std": float(found.std()),
        "advantage/max_abs": float(np.abs(found).max()),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and population std of `values` as `NAME/mean` and `NAME/std`."""
    mean = math.fsum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))}


def _whiten(samples: Sequence[Sample]) -> None:
    """Bring the advantages of all targets to mean 0 and variance 1 (plus 1e-8, as in TRL's `masked_whiten`)."""
    found = np.concatenate([sample.per_token[ADVANTAGE][sample.targets].astype(np.float64) for sample in samples])
    if len(found) < 2:
        return
    mean, std = found.mean(), math.sqrt(found.var(ddof=1) + 1e-8)
    for sample in samples:
        own = sample.per_token[ADVANTAGE][sample.targets].astype(np.float64)
        _give(sample, ADVANTAGE, (own - mean) / std)


def _targets(sample: Sample, name: str) -> torch.Tensor:
    return torch.from_numpy(sample.per_token[name][sample.targets].astype(np.float64))


def _give(sample: Sample, name: str, values_T: np.ndarray) -> None:
    sample.per_token[name] = np.zeros(len(sample.token_ids), dtype=np.float32)
    sample.per_token[name][sample.targets] = values_T
