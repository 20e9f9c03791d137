"""The orchestrator's numbers about one batch; the trainer writes them out beside its own."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config.environments import EnvironmentConfig
from holdfast.orchestrator.batch_maker import Selection
from holdfast.orchestrator.client.pool import EngineCounts
from holdfast.orchestrator.episodes import is_solved
from holdfast.orchestrator.evaluation.statistics import pass_at_k
from holdfast.protocol.rollouts import DROP_REASONS, Rollout, Signal, zero_variance


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
    selection: Selection,
    times: BatchTimes,
    *,
    step: int,
    num_reused: int,
    engines: Sequence[EngineCounts],
    environments: Sequence[EnvironmentConfig],
    signal: Signal | None,
) -> dict[str, float]:
    """Return metrics by slash-separated name; docs/metrics.md says what each means.

    They are about every scored group, those that dynamic sampling dropped too: what the policy is worth
    must not depend on which of its groups are trained.

    Args:
        selection: the groups of the batch, and what was drawn besides.
        times: where the time went.
        step: of the batch.
        num_reused: turns that were sampled before a restart.
        engines: what each was asked in the period.
        environments: of the config.
        signal: what dynamic sampling looks for; without it the trainer, which knows its advantage, counts the groups.
    """
    groups = [*selection.groups, *selection.unused]
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    sampled = [rollout.loss_mask.num_sampled for rollout in rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    metrics = {
        # Here and below fmean, which adds exactly: the order of the rollouts does not matter.
        "reward/mean": statistics.fmean(rewards),
        "reward/std": _std(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "rollout/tokens_mean": statistics.fmean(lengths),
        "rollout/tokens_max": float(max(lengths)),
        "rollout/sampled_tokens_mean": statistics.fmean(sampled),
        "rollout/truncated": statistics.fmean([rollout.truncated for rollout in rollouts]),
        "rollout/turns": statistics.fmean([rollout.loss_mask.num_stretches for rollout in rollouts]),
        "rollout/branches": statistics.fmean([len(rollout.branch_starts) for rollout in rollouts]),
        "rollout/split": statistics.fmean([len(rollout.branch_starts) > 1 for rollout in rollouts]),
        "rollout/reused_turns": float(num_reused),
        "groups/drawn": float(len(selection.groups) + len(selection.dropped)),
        "rollouts_per_s": len(rollouts) / times.period,
        "sampled_tokens_per_s": sum(sampled) / times.period,
        "time/batch": times.period,
        "time/generate": times.generate,
        "time/wait_for_weights": times.wait_for_weights,
        "time/update_weights": times.update_weights,
        "engine/idle_share": min(1.0, max(0.0, 1.0 - times.busy / times.period)),
    }
    if signal is not None:
        metrics |= zero_variance(groups, signal)
    if any(rollout.step_rewards for rollout in rollouts):
        steps = [rollout.step_rewards.rewards if rollout.step_rewards else () for rollout in rollouts]
        metrics["reward/steps_mean"] = statistics.fmean([math.fsum(own) for own in steps])
    reasons = Counter(one.reason for one in selection.dropped)
    metrics |= {f"groups/dropped/{reason}": float(reasons[reason]) for reason in DROP_REASONS}
    for number, counts in enumerate(engines):
        metrics |= _engine_metrics(number, counts, period=times.period)
    metrics |= _staleness(rollouts, step=step)
    for settings in environments:
        if of_environment := [group for group in groups if group[0].environment == settings.label]:
            metrics |= _environment_metrics(settings, of_environment)
    return metrics


def _engine_metrics(number: int, counts: EngineCounts, *, period: float) -> dict[str, float]:
    return {
        f"engine/{number}/requests": float(counts.requests),
        f"engine/{number}/failures": float(counts.failures),
        f"engine/{number}/in_flight": counts.in_flight_s / period,
    }


def _staleness(rollouts: Sequence[Rollout], *, step: int) -> dict[str, float]:
    """Return by how many optimizer steps the versions that sampled the tokens are behind, over sampled tokens."""
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        for span in rollout.versions:
            # Step N trains version N - 1.
            tokens[step - 1 - span.version] += span.end - span.start
    if not tokens:  # a teacher sampled them
        return {}
    mean = sum(age * number for age, number in tokens.items()) / tokens.total()
    return {"staleness/mean": mean, "staleness/max": float(max(tokens))}


def _environment_metrics(settings: EnvironmentConfig, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    name = settings.label
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    # Quantiles of a single reward are refused; those of the same one twice are that reward.
    deciles = statistics.quantiles(rewards if len(rewards) > 1 else rewards * 2, n=10, method="inclusive")
    metrics = {
        f"reward/{name}/mean": statistics.fmean(rewards),
        f"reward/{name}/std": _std(rewards),
        f"reward/{name}/p10": deciles[0],
        f"reward/{name}/p50": deciles[4],
        f"reward/{name}/p90": deciles[8],
    }
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for metric, value in rollout.metrics.items():
            values.setdefault(f"{name}/{metric}", []).append(value)
    metrics |= {metric: statistics.fmean(found) for metric, found in values.items()}
    verdicts = [[is_solved(rollout, settings.success_reward) for rollout in group] for group in groups]
    if all(verdict is not None for own in verdicts for verdict in own):
        solved = [sum(map(bool, own)) for own in verdicts]
        size = len(groups[0])
        for power in range(size.bit_length()):
            k = 2**power
            metrics[f"{name}/pass@{k}"] = statistics.fmean([pass_at_k(size, number, k) for number in solved])
    return metrics


def _std(values: Sequence[float]) -> float:
    """Return the population std: the spread of these values, not an estimate for others."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean([(value - mean) ** 2 for value in values]))
