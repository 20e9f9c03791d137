"""Turns the environments' rewards of a batch into the rewards that advantages are computed from.

    rewards of the environments, weighed -> reward model -> length penalty, clip, scale

`RunningMoments` keeps mean and standard deviation of all rewards of the run so far, to scale rewards. Normalising by
group or by batch, (r - mean) / std, is an advantage, not a reward: `grpo` and `reinforce_pp`.

Shape legend: P problems of the batch, G rollouts of one problem.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from holdfast.config import TrainerConfig
from holdfast.config.algorithm import RewardConfig
from holdfast.errors import TrainingError, nearest
from holdfast.protocol.rollouts import Rollout
from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.auxiliary_models import RewardModel
from holdfast.trainer.rl.token_rewards import OWN_REWARD, reward_components


class RunningMoments(State):
    """Mean and variance over every batch seen, by the parallel update of Chan et al. 1979.

    They start as mean 0 and variance 1 with next to no weight (1e-24 observations, as in trlX's RunningMoments): the
    first batch replaces them except for rounding.

    Attributes:
        mean: mean of the rewards.
        var: their population variance.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.var = 1.0
        self.count = 1e-24

    @property
    def std(self) -> float:
        """The sample standard deviation (denominator count - 1); 1 while there are fewer than two rewards."""
        if self.count <= 1:
            return 1.0
        return math.sqrt(self.var * self.count / (self.count - 1))

    def update(self, rewards: Sequence[float]) -> None:
        """Take over the rewards of a batch from all ranks: moments of parts must not be averaged.

        Sums are exact before their one rounding, so the order of the rewards does not matter."""
        num = len(rewards)
        if num == 0:
            return
        batch_mean = math.fsum(rewards) / num
        batch_var = math.fsum((reward - batch_mean) ** 2 for reward in rewards) / num
        difference = batch_mean - self.mean
        total = self.count + num
        self.mean += difference * num / total
        self.var = (self.var * self.count + batch_var * num + difference**2 * self.count * num / total) / total
        self.count = total

    def values(self) -> dict[str, Any]:
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def restore(self, values: dict[str, Any]) -> None:
        self.mean, self.var, self.count = (float(values[name]) for name in ("mean", "var", "count"))


# Equal rewards leave rounding of this size, relative to their mean, as their standard deviation.
_ROUNDING = math.sqrt(sys.float_info.epsilon)


def soft_overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return what to add to the reward of a completion for its length: from 0 down to -1.

    0 up to `max_tokens - buffer_tokens`, then linearly down to -1 at `max_tokens`, and -1 beyond (Yu et al. 2025,
    "DAPO", soft overlong punishment). Without a buffer it falls from 0 to -1 above `max_tokens`. `num_tokens`: sampled
    tokens of the completion."""
    excess_tokens = num_tokens - (max_tokens - buffer_tokens)
    if excess_tokens <= 0:
        return 0.0
    if num_tokens >= max_tokens:
        return -1.0
    return -excess_tokens / buffer_tokens


def shape_rewards(
    rewards_PG: Sequence[Sequence[float]],
    *,
    penalties_PG: Sequence[Sequence[float]] | None = None,
    clip: float | None = None,
    moments: RunningMoments | None = None,
) -> list[list[float]]:
    """Return the rewards of one batch as advantages see them; each step is optional.

    In this order: add the penalties, clip to `[-clip, clip]`, take the rewards of this batch into `moments`, divide by
    their standard deviation. One outlier spoils no scale, and a batch counts in its own.

    Args:
        rewards_PG: scored rewards of the whole batch, all ranks'; not changed.
        penalties_PG: what to add to each, such as `soft_overlong_penalty`.
        clip: largest magnitude of a penalised reward.
        moments: the rewards so far; updated.
    """
    shaped_PG = [list(rewards_G) for rewards_G in rewards_PG]
    if penalties_PG is not None:
        shaped_PG = [
            [reward + penalty for reward, penalty in zip(rewards_G, penalties_G, strict=True)]
            for rewards_G, penalties_G in zip(shaped_PG, penalties_PG, strict=True)
        ]
    if clip is not None:
        shaped_PG = [[min(max(reward, -clip), clip) for reward in rewards_G] for rewards_G in shaped_PG]
    if moments is not None:
        moments.update(list(chain.from_iterable(shaped_PG)))
        # While all rewards were equal, nothing says what their scale is: they stay as they are.
        if not moments.std <= _ROUNDING * abs(moments.mean):
            shaped_PG = [[reward / moments.std for reward in rewards_G] for rewards_G in shaped_PG]
    return shaped_PG


def mean_and_std(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and population std of `values` as `NAME/mean` and `NAME/std`."""
    mean = math.fsum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))}


def rewards_of_batch(
    groups: Sequence[Sequence[Rollout]],
    samples: Sequence[Sample],
    config: TrainerConfig,
    *,
    reward_model: RewardModel | None,
    moments: RunningMoments | None,
) -> tuple[list[list[float]], dict[str, float]]:
    """Return the rewards after shaping, (P, G), and metrics. Collective.

    Args:
        samples: of the rollouts.
        moments: of all rewards so far; updated.

    Raise TrainingError if an environment does not give what `rewards.weights` names.
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
        rewards_PG, penalties_PG=_length_penalties(groups, config.rewards), clip=config.rewards.clip, moments=moments
    )
    if shaped_PG != rewards_PG:
        metrics |= mean_and_std("reward/shaped", list(chain.from_iterable(shaped_PG)))
    return shaped_PG, metrics


def _weighted_sum(rollout: Rollout, weights: Mapping[str, float]) -> float:
    """Return the sum of the environment's rewards, each times its weight."""
    values = reward_components(rollout.reward, rollout.metrics)
    if missing := [name for name in weights if name not in values]:
        raise TrainingError(
            f"rewards.weights names '{missing[0]}', which environment '{rollout.environment}' does not give for task "
            f"{rollout.task_id}.{nearest(missing[0], values)} It gives: {', '.join(values)}"
        )
    return math.fsum(weight * values[name] for name, weight in weights.items())


def _length_penalties(groups: Sequence[Sequence[Rollout]], config: RewardConfig) -> list[list[float]] | None:
    """Return what the lengths of the rollouts add to their rewards, (P, G); None if they add nothing."""
    most, buffer = config.length_max_tokens, config.length_buffer_tokens
    if most is None or buffer is None:
        return None
    factor = config.length_penalty
    return [
        [factor * soft_overlong_penalty(sum(one.loss_mask), max_tokens=most, buffer_tokens=buffer) for one in group]
        for group in groups
    ]
