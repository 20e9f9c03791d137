"""Online DPO: the best and the worst rollout of each problem as a pair, by advantages that give DPO's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from holdfast.trainer.rl.advantages.scored_rollouts import Groups, ScoredRollout


def online_dpo(groups: Groups, *, beta: float | None) -> list[list[float]]:
    """Return the advantages of all rollouts whose policy gradient is that of DPO's loss, mean over the problems.

    Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback": the first of the best and the first of
    the worst rollout of a problem are a pair for the loss of Rafailov et al. 2023, eq. 7, `-log sigmoid(h)`, `h =
    beta (d_w - d_l)`, d = log policy - log reference of the whole answer. Its gradient is `-beta sigmoid(-h)` times
    that of `l_w - l_l`, so REINFORCE with `beta sigmoid(-h)` as the advantage of the best, minus that as the worst's,
    and 0 for all others takes the same step. It does so for the one update of a step: h is that of the weights before.
    With equal rewards there is no pair, and all advantages are 0.

    The advantages are as many times larger as there are rollouts for each problem: then the mean over rollouts of the
    sums of their tokens (`aggregation = "constant"`, `constant_tokens = 1`) is the mean over problems.

    Args:
        beta: strength of the tie to the reference. None: 0.1, as for DPO.
    """
    scale = sum(map(len, groups)) / max(1, len(groups))
    return [_of_problem(group, 0.1 if beta is None else beta, scale) for group in groups]


def _of_problem(group: Sequence[ScoredRollout], beta: float, scale: float) -> list[float]:
    best = max(range(len(group)), key=lambda place: group[place].total_reward)
    worst = min(range(len(group)), key=lambda place: group[place].total_reward)
    advantages_G = [0.0] * len(group)
    if group[best].total_reward != group[worst].total_reward:
        margin = beta * (_log_ratio(group[best]) - _log_ratio(group[worst]))
        # sigmoid(-margin) without an overflow
        smaller = math.exp(-abs(margin))
        advantages_G[best] = scale * beta * (smaller if margin > 0 else 1.0) / (1 + smaller)
        advantages_G[worst] = -advantages_G[best]
    return advantages_G


def _log_ratio(one: ScoredRollout) -> float:
    """Return log policy - log reference of the whole answer before the step, in nats."""
    assert one.old_logprobs is not None and one.reference_logprobs is not None  # the config asks for both
    return math.fsum(np.subtract(one.old_logprobs, one.reference_logprobs, dtype=np.float64).tolist())
