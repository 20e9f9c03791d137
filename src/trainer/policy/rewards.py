"""From the environments' rewards of a batch to those that advantages are computed from.

    rewards of the environments -> reward model -> length penalty, clip, scale

Shape legend: P problems, G rollouts of one problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from trainer.packing import Sample
from trainer.policy.experience import spread
from trainer.policy.parts import RlParts
from trainer.policy.reward_shaping import shape_rewards, soft_overlong_penalty
from triad.config import TrainerConfig
from triad.config.algorithm import RewardConfig
from triad.messages import Rollout


def rewards_of_batch(
    groups: Sequence[Sequence[Rollout]],
    samples: Sequence[Sample],
    config: TrainerConfig,
    parts: RlParts,
    *,
    num_fresh: int,
) -> tuple[list[list[float]], dict[str, float]]:
    """Return the rewards after shaping, (P, G), and metrics. Collective.

    Args:
        samples: of the rollouts.
        num_fresh: groups of this batch; those after them are replayed, and the moments have seen them.
    """
    metrics = dict[str, float]()
    rewards_PG = [[rollout.reward for rollout in group] for group in groups]
    if parts.reward_model is not None and config.reward_model is not None:
        scores = parts.reward_model.score(samples, row_tokens=config.row_tokens)
        metrics |= spread("reward_model", scores)
        found, weights = iter(scores), config.reward_model
        rewards_PG = [
            [weights.rules_weight * reward + weights.weight * next(found) for reward in rewards_G]
            for rewards_G in rewards_PG
        ]
    shaped_PG = shape_rewards(
        rewards_PG,
        penalties_PG=_length_penalties(groups, config.rewards),
        clip=config.rewards.clip,
        moments=parts.moments,
        num_new=num_fresh,
    )
    if shaped_PG != rewards_PG:
        metrics |= spread("reward/shaped", list(chain.from_iterable(shaped_PG)))
    return shaped_PG, metrics


def _length_penalties(groups: Sequence[Sequence[Rollout]], config: RewardConfig) -> list[list[float]] | None:
    """Return what the lengths of the rollouts add to their rewards, (P, G); None where they add nothing."""
    most, buffer = config.length_max_tokens, config.length_buffer_tokens
    if most is None or buffer is None:
        return None
    return [
        [soft_overlong_penalty(sum(one.loss_mask), max_tokens=most, buffer_tokens=buffer) for one in group]
        for group in groups
    ]
