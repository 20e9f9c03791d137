"""What a batch of rollouts says about the policy: rewards, penalties and, from them, the advantage of every token.

    rewards of the environments -> reward model -> length penalty, clip, scale -> KL penalty -> advantages

All ranks see all rollouts and measurements, so all compute the same.

Shape legend: P problems, G rollouts of one problem, T sampled tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType

import numpy as np
import torch

from holdfast.shared.config.algorithm import CriticConfig
from holdfast.shared.errors import DataError
from holdfast.shared.wire.rollouts import Rollout
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.advantages.estimators import Groups, JudgedRollout, whiten
from holdfast.trainer.rl.advantages.gae import generalized_advantages
from holdfast.trainer.rl.kl import KlEstimator, estimate_kl
from holdfast.trainer.rl.rollouts import (
    ADVANTAGE,
    OLD_LOGPROB,
    REFERENCE_LOGPROB,
    RETURN,
    SAMPLER_LOGPROB,
    VALUE,
    assign_targets,
)


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


def judge_rollouts(
    groups: Sequence[Sequence[Rollout]],
    samples: Sequence[Sample],
    rewards_PG: Sequence[Sequence[float]],
    penalty: Penalty | None,
    *,
    mask_truncated: bool = False,
) -> list[list[JudgedRollout]]:
    """Return the rollouts as advantages see them, with what each of their tokens earned.

    Args:
        samples: of the rollouts, with their whole masks: penalties of rollouts that are not trained count too.
        rewards_PG: after shaping, before the penalty.
        mask_truncated: whether truncated rollouts are not trained.
    """
    of_rollouts = iter(samples)
    return [
        [
            _judged(rollout, next(of_rollouts), reward, penalty, is_trained=not (mask_truncated and rollout.truncated))
            for rollout, reward in zip(group, rewards_G, strict=True)
        ]
        for group, rewards_G in zip(groups, rewards_PG, strict=True)
    ]


def _judged(
    rollout: Rollout, sample: Sample, reward: float, penalty: Penalty | None, *, is_trained: bool
) -> JudgedRollout:
    places = sample.targets
    token_rewards_T = -penalty.of(sample) if penalty else np.zeros(len(places))
    penalties = -math.fsum(token_rewards_T.tolist())
    if len(places):
        token_rewards_T[-1] += reward
    step_ends, step_rewards = _steps(rollout, places)
    token_rewards_T[step_ends] += step_rewards
    starts = np.flatnonzero(np.diff(places, prepend=-1) > 1)
    return JudgedRollout(
        environment=rollout.environment,
        task_id=rollout.task_id,
        token_ids=_read_only(sample.token_ids),
        places=_read_only(places),
        turns=tuple(pairwise([*starts.tolist(), len(places)])),
        logprobs=_read_only(sample.per_token[SAMPLER_LOGPROB][places]),
        old_logprobs=_of_targets(sample, OLD_LOGPROB),
        reference_logprobs=_of_targets(sample, REFERENCE_LOGPROB),
        truncated=rollout.truncated,
        is_trained=is_trained,
        environment_reward=rollout.reward,
        metrics=MappingProxyType(rollout.metrics),
        reward=reward - penalties,
        step_ends=_read_only(step_ends),
        step_rewards=_read_only(step_rewards),
        token_rewards=_read_only(token_rewards_T),
    )


def _of_targets(sample: Sample, name: str) -> np.ndarray | None:
    return _read_only(sample.per_token[name][sample.targets]) if name in sample.per_token else None


def _steps(rollout: Rollout, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the parts that have rewards, as indices of the sampled tokens, and the rewards.

    Raises:
        DataError: a part does not end with a sampled token.
    """
    if rollout.step_rewards is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    ends = np.asarray(rollout.step_rewards.places, dtype=np.int64)
    indices = np.searchsorted(places, ends)
    if len(ends) != len(rollout.step_rewards.rewards) or not np.isin(ends, places).all() or (np.diff(ends) < 1).any():
        raise DataError(
            f"rollout of {rollout.environment} task {rollout.task_id} sample {rollout.sample_index}: its step_rewards "
            f"are {len(rollout.step_rewards.rewards)} rewards at {len(ends)} places, which must be as many different "
            "places of sampled tokens, in order"
        )
    return indices, np.asarray(rollout.step_rewards.rewards, dtype=np.float64)


def _read_only(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view


def critic_advantages(samples: Sequence[Sample], judged_PG: Groups, config: CriticConfig) -> None:
    """Give every target its advantage and return by GAE: penalties at each token, the reward at the last one.

    As in Ouyang et al. 2022, "Training language models to follow instructions with human feedback".
    """
    for sample, judged in zip(samples, chain.from_iterable(judged_PG), strict=True):
        advantages_T, returns_T = generalized_advantages(
            torch.from_numpy(judged.token_rewards.copy()), _targets(sample, VALUE), gamma=config.gamma, lam=config.lam
        )
        assign_targets(sample, ADVANTAGE, advantages_T.numpy())
        assign_targets(sample, RETURN, returns_T.numpy())


def whiten_advantages(samples: Sequence[Sample]) -> None:
    """Bring the advantages of all targets to mean 0 and variance 1, see `whiten`; a single one stays as it is."""
    found = [sample.per_token[ADVANTAGE][sample.targets].astype(np.float64) for sample in samples]
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
        divergence_T = _targets(sample, OLD_LOGPROB) - _targets(sample, REFERENCE_LOGPROB)
        assign_targets(sample, ADVANTAGE, (_targets(sample, ADVANTAGE) - coef * divergence_T).numpy())
        divergences += divergence_T.tolist()
    return {"distillation/kl": math.fsum(divergences) / max(1, len(divergences) - 1)}


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


def _targets(sample: Sample, name: str) -> torch.Tensor:
    return torch.from_numpy(sample.per_token[name][sample.targets].astype(np.float64))
