"""REINFORCE++: rewards to go, normalised over all sampled tokens of the batch.

Shape legend: P problems of the batch, G rollouts of one problem, T sampled tokens of one rollout.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from holdfast.trainer.rl.advantages.base import rewards_to_go, whiten
from holdfast.trainer.rl.advantages.group import dr_grpo
from holdfast.trainer.rl.advantages.scored_rollouts import Groups


def reinforce_pp(groups: Groups) -> list[list[np.ndarray]]:
    """Return the rewards to go of every token, whitened over all sampled tokens of the batch.

    Hu et al. 2025, "REINFORCE++": the advantage of token t is `r - coef * sum of the KL of t and later tokens`, less
    its mean and divided by its std over the tokens of the batch. As verl's
    `compute_reinforce_plus_plus_outcome_advantage` with gamma 1. The mean is a baseline, so rollouts that are not
    trained count too.
    """
    return _whitened([[rewards_to_go(one.token_rewards) for one in group] for group in groups])


def reinforce_pp_baseline(groups: Groups) -> list[list[np.ndarray]]:
    """Return `r - mean` of the group at each token, whitened over all sampled tokens of the batch.

    Hu et al. 2025, "REINFORCE++", with baseline; as verl's
    `compute_reinforce_plus_plus_baseline_outcome_advantage`: a KL penalty counts as a sum.
    """
    return _whitened(
        [
            [
                np.full(one.num_tokens, value)
                for one, value in zip(group, dr_grpo([one.total_reward for one in group]), strict=True)
            ]
            for group in groups
        ]
    )


def _whitened(values_PG: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    whitened = iter(whiten(list(chain.from_iterable(values_PG))))
    return [[next(whitened) for _ in values_G] for values_G in values_PG]
