"""Rollouts as advantages see them: with their rewards, whole and token by token, less the KL penalty.

All ranks see all rollouts and measurements, so all compute the same.

Shape legend: P problems, G rollouts of one problem, T sampled tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from holdfast.errors import DataError

if TYPE_CHECKING:
    from holdfast.protocol.rollouts import Rollout
    from holdfast.trainer.data.packing import Sample
    from holdfast.trainer.rl.kl import KlPenalty


def attach_rewards(
    groups: Sequence[Sequence[Rollout]],
    samples: Sequence[Sample],
    rewards_PG: Sequence[Sequence[float]],
    penalty: KlPenalty | None,
    *,
    mask_truncated: bool = False,
) -> list[list[ScoredRollout]]:
    """Return the rollouts as advantages see them, with the reward of each token.

    Args:
        samples: of the rollouts, with their whole masks: penalties of rollouts that are not trained count too.
        rewards_PG: after shaping, before the penalty.
        mask_truncated: whether truncated rollouts are not trained.
    """
    of_rollouts = iter(samples)
    return [
        [
            _score(rollout, next(of_rollouts), reward, penalty, is_trained=not (mask_truncated and rollout.truncated))
            for rollout, reward in zip(group, rewards_G, strict=True)
        ]
        for group, rewards_G in zip(groups, rewards_PG, strict=True)
    ]


def _score(
    rollout: Rollout, sample: Sample, reward: float, penalty: KlPenalty | None, *, is_trained: bool
) -> ScoredRollout:
    from holdfast.trainer.rl.batch import OLD_LOGPROB, REFERENCE_LOGPROB, SAMPLER_LOGPROB  # imports torch

    places = sample.targets
    token_rewards_T = -penalty.of(sample) if penalty else np.zeros(len(places))
    penalties = -math.fsum(token_rewards_T.tolist())
    if len(places):
        token_rewards_T[-1] += reward
    step_ends, step_rewards = _steps(rollout, places)
    token_rewards_T[step_ends] += step_rewards
    starts = np.flatnonzero(np.diff(places, prepend=-1) > 1)
    return ScoredRollout(
        environment=rollout.environment,
        task_id=rollout.task_id,
        token_ids=_read_only(sample.token_ids),
        branch_starts=sample.starts,
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
    """Return the ends of the parts that have rewards, as indices of the sampled tokens, and the rewards. Raise
    DataError if a part does not end with a sampled token."""
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


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """One rollout as an advantage sees it. It is read-only. T is the number of its sampled tokens.

    Attributes:
        environment: the environment's name.
        task_id: the task's number in the environment.
        token_ids: the whole session, prompt first, int32. Branches follow each other.
        places: the positions of the sampled tokens in `token_ids`, (T,).
        turns: the first token and the end of each sampled turn, as indices into the T tokens.
        logprobs: log-probabilities under the policy that sampled, at its temperature, (T,), float32.
        old_logprobs: log-probabilities under the trainer's weights before this step, (T,). None if the run does not
            measure them.
        reference_logprobs: log-probabilities under the reference or a teacher, (T,). None without either.
        truncated: whether a token limit ended the session or a turn.
        is_trained: whether its tokens are in the loss. Truncated rollouts are not with `rewards.truncated = "mask"`.
        environment_reward: the environment's reward.
        metrics: the environment's other numbers.
        reward: the reward of the whole rollout, after reward model, length penalty, clip and scale, less the KL
            penalties.
        step_ends: the last token of each turn or token with its own reward, as indices into the T tokens, (K,).
        step_rewards: these rewards, as the environment gave them, (K,), float64.
        token_rewards: the rewards of each token, (T,), float64. KL penalties are at each token, rewards of turns at
            the turn's last token, and the other rewards at the last token.
        branch_starts: the position in `token_ids` at which each branch begins.
    """

    environment: str
    task_id: int
    token_ids: np.ndarray
    places: np.ndarray
    turns: tuple[tuple[int, int], ...]
    logprobs: np.ndarray
    old_logprobs: np.ndarray | None
    reference_logprobs: np.ndarray | None
    truncated: bool
    is_trained: bool
    environment_reward: float
    metrics: Mapping[str, float]
    reward: float
    step_ends: np.ndarray
    step_rewards: np.ndarray
    token_rewards: np.ndarray
    branch_starts: tuple[int, ...] = (0,)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens, T."""
        return len(self.places)

    @property
    def total_reward(self) -> float:
        """The reward of the whole rollout plus the rewards of its turns or tokens."""
        return self.reward + math.fsum(self.step_rewards.tolist())


Groups = Sequence[Sequence[ScoredRollout]]
"""The rollouts of a batch, problem by problem."""


OWN_REWARD = "reward"
"""The environment's own reward, among the names of `rewards.weights`."""


def reward_components(reward: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what an environment gave by name: its metrics, and its own reward as `reward`."""
    return {**metrics, OWN_REWARD: reward}
