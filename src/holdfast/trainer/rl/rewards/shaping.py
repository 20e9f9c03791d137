"""What is done to rewards before advantages are computed from them: length penalty, clip, scale.

Normalising by group or by batch, (r - mean) / std, is an advantage of its own: `grpo` and `reinforce_pp`.

Shape legend: P problems of the batch, G rollouts of one problem.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import chain

from holdfast.trainer.rl.rewards.running_moments import RunningMoments

# Equal rewards leave rounding of this size, relative to their mean, as their standard deviation.
_ROUNDING = math.sqrt(sys.float_info.epsilon)


def soft_overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return what to add to the reward of a completion for its length: from 0 down to -1.

    0 up to `max_tokens - buffer_tokens`, then linearly down to -1 at `max_tokens`, and -1 beyond (Yu et al. 2025,
    "DAPO", soft overlong punishment). Without a buffer it falls from 0 to -1 above `max_tokens`.

    Args:
        num_tokens: sampled tokens of the completion.
    """
    excess_tokens = num_tokens - (max_tokens - buffer_tokens)
    if excess_tokens <= 0:
        return 0.0
    if num_tokens >= max_tokens:
        return -1.0
    return -excess_tokens / buffer_tokens


def clip_rewards(rewards_PG: Sequence[Sequence[float]], bound: float) -> list[list[float]]:
    """Return the rewards, those beyond `[-bound, bound]` moved to its ends."""
    return [[min(max(reward, -bound), bound) for reward in rewards_G] for rewards_G in rewards_PG]


def scale_rewards(rewards_PG: Sequence[Sequence[float]], moments: RunningMoments) -> list[list[float]]:
    """Return the rewards divided by the standard deviation of all rewards so far; their mean stays in.

    While all rewards were equal, nothing says what their scale is: they stay as they are.
    """
    std = moments.std
    if std <= _ROUNDING * abs(moments.mean):
        return [list(rewards_G) for rewards_G in rewards_PG]
    return [[reward / std for reward in rewards_G] for rewards_G in rewards_PG]


def shape_rewards(
    rewards_PG: Sequence[Sequence[float]],
    *,
    penalties_PG: Sequence[Sequence[float]] | None = None,
    clip: float | None = None,
    moments: RunningMoments | None = None,
    num_new: int | None = None,
) -> list[list[float]]:
    """Return the rewards of one batch as advantages see them; every step applies where it is given.

    In this order: add the penalties, clip to `[-clip, clip]`, take the rewards of this batch into `moments`, divide
    by their standard deviation. So one outlier spoils no scale, and a batch counts in its own.

    Args:
        rewards_PG: scored rewards of the whole batch, all ranks'; not changed.
        penalties_PG: what to add to each, such as `soft_overlong_penalty`.
        clip: largest magnitude of a penalised reward.
        moments: the rewards so far; updated.
        num_new: how many problems `moments` has not seen, from the first; the rest are replayed. None: all.
    """
    shaped_PG = [list(rewards_G) for rewards_G in rewards_PG]
    if penalties_PG is not None:
        shaped_PG = [
            [reward + penalty for reward, penalty in zip(rewards_G, penalties_G, strict=True)]
            for rewards_G, penalties_G in zip(shaped_PG, penalties_PG, strict=True)
        ]
    if clip is not None:
        shaped_PG = clip_rewards(shaped_PG, clip)
    if moments is not None:
        moments.update(list(chain.from_iterable(shaped_PG[:num_new])))
        shaped_PG = scale_rewards(shaped_PG, moments)
    return shaped_PG
