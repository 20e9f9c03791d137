"""The orchestrator's numbers about one batch; the trainer writes them out beside its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from triad.messages import Rollout


@dataclass(frozen=True)
class BatchTimes:
    """Where the wall time of one batch went, in seconds.

    Attributes:
        period: from the end of the batch before to the end of this one.
        wait_for_weights: until the trainer had published the version.
        update_weights: until all engines had proved to serve it.
        generate: until the last rollout was scored.
        busy: part of the period in which at least one of our requests was in flight.
    """

    period: float
    wait_for_weights: float
    update_weights: float
    generate: float
    busy: float


def batch_metrics(
    rollouts: Sequence[Rollout], times: BatchTimes, *, group_size: int, num_reused: int, policy_age: int
) -> dict[str, float]:
    """Return metrics by slash-separated name.

    Args:
        rollouts: the batch, problem by problem, each with `group_size` rollouts.
        times: where the time went.
        group_size: rollouts of one problem.
        num_reused: turns that were sampled before a restart.
        policy_age: step of the batch - 1 - policy version: optimizer steps that the policy is behind.
    """
    rewards = [rollout.reward for rollout in rollouts]
    sampled = [sum(rollout.loss_mask) for rollout in rollouts]
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    mean = _mean(rewards)
    metrics = {
        "reward/mean": mean,
        # Population std: the spread of this batch, not an estimate for others.
        "reward/std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "rollout/tokens_mean": _mean([len(rollout.token_ids) for rollout in rollouts]),
        "rollout/sampled_tokens_mean": _mean(sampled),
        "rollout/truncated_share": _mean([rollout.truncated for rollout in rollouts]),
        "rollout/zero_variance_share": _mean([max(group) == min(group) for group in groups]),
        "rollout/reused_turns": float(num_reused),
        "rollout/policy_age": float(policy_age),
        "rollouts_per_s": len(rollouts) / times.period,
        "sampled_tokens_per_s": sum(sampled) / times.period,
        "time/batch": times.period,
        "time/generate": times.generate,
        "time/wait_for_weights": times.wait_for_weights,
        "time/update_weights": times.update_weights,
        "engine/idle_share": min(1.0, max(0.0, 1.0 - times.busy / times.period)),
    }
    return metrics | _environment_metrics(rollouts)


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        values.setdefault(f"reward/{rollout.environment}/mean", []).append(rollout.reward)
        for name, value in rollout.metrics.items():
            values.setdefault(f"{rollout.environment}/{name}", []).append(value)
    return {name: _mean(found) for name, found in values.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
