"""From the environments' rewards of a batch to those that advantages are computed from.

    rewards of the environments, weighed -> reward model -> length penalty, clip, scale

Shape legend: P problems, G rollouts of one problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from holdfast.shared.config import TrainerConfig
from holdfast.shared.config.algorithm import RewardConfig
from holdfast.shared.errors import TrainingError, nearest
from holdfast.shared.wire.rollouts import Rollout
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.rewards.reward_model import RewardModel
from holdfast.trainer.rl.rewards.running_moments import RunningMoments
from holdfast.trainer.rl.rewards.shaping import shape_rewards, soft_overlong_penalty


def mean_and_std(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and population std of `values` as `NAME/mean` and `NAME/std`."""
    mean = math.fsum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))}


OWN_REWARD = "reward"
"""The environment's own reward, among the names of `rewards.weights`."""


def reward_components(reward: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what an environment gave by name: its metrics, and its own reward as `reward`."""
    return {**metrics, OWN_REWARD: reward}


def rewards_of_batch(
    groups: Sequence[Sequence[Rollout]],
    samples: Sequence[Sample],
    config: TrainerConfig,
    *,
    reward_model: RewardModel | None,
    moments: RunningMoments | None,
    num_fresh: int,
) -> tuple[list[list[float]], dict[str, float]]:
    """Return the rewards after shaping, (P, G), and metrics. Collective.

    Args:
        samples: of the rollouts.
        moments: of all rewards so far; updated.
        num_fresh: groups of this batch; those after them are replayed, and the moments have seen them.

    Raises:
        TrainingError: an environment does not give what `rewards.weights` names.
    """
    metrics = dict[str, float]()
    weights = config.rewards.weights or {OWN_REWARD: 1.0}
    rewards_PG = [[_weighted_sum(rollout, weights) for rollout in group] for group in groups]
    if reward_model is not None and config.reward_model is not None:
        scores = reward_model.score(samples, row_tokens=config.row_tokens)
        metrics |= mean_and_std("reward_model", scores)
        found, weighting = iter(scores), config.reward_model
        rewards_PG = [
            [
                weighting.rules_weight * reward
                + weighting.weight * (next(found) - weighting.missing_eos_penalty * rollout.truncated)
                for reward, rollout in zip(rewards_G, group, strict=True)
            ]
            for rewards_G, group in zip(rewards_PG, groups, strict=True)
        ]
    shaped_PG = shape_rewards(
        rewards_PG,
        penalties_PG=_length_penalties(groups, config.rewards),
        clip=config.rewards.clip,
        moments=moments,
        num_new=num_fresh,
    )
    if shaped_PG != rewards_PG:
        metrics |= mean_and_std("reward/shaped", list(chain.from_iterable(shaped_PG)))
    return shaped_PG, metrics


def _weighted_sum(rollout: Rollout, weights: Mapping[str, float]) -> float:
    """Return the sum of what the environment gave, each times its weight."""
    values = reward_components(rollout.reward, rollout.metrics)
    if missing := [name for name in weights if name not in values]:
        raise TrainingError(
            f"rewards.weights names '{missing[0]}', which environment '{rollout.environment}' does not give for task "
            f"{rollout.task_id}.{nearest(missing[0], values)} It gives: {', '.join(values)}"
        )
    return math.fsum(weight * values[name] for name, weight in weights.items())


def _length_penalties(groups: Sequence[Sequence[Rollout]], config: RewardConfig) -> list[list[float]] | None:
    """Return what the lengths of the rollouts add to their rewards, (P, G); None where they add nothing."""
    most, buffer = config.length_max_tokens, config.length_buffer_tokens
    if most is None or buffer is None:
        return None
    factor = config.length_penalty
    return [
        [factor * soft_overlong_penalty(sum(one.loss_mask), max_tokens=most, buffer_tokens=buffer) for one in group]
        for group in groups
    ]
