"""From rollouts to numbers: avg@k, pass@k and what else environments say, by environment, with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.orchestrator.evaluation.estimates import Estimate, mean_over_tasks, pass_at_k, powers_up_to
from holdfast.orchestrator.evaluation.results import (
    FORMAT,
    ROLLOUTS_NAME,
    EvaluatedRollout,
    read_identity,
    read_tasks,
)
from holdfast.shared.errors import DataError
from holdfast.shared.files.run_dir import SUMMARY_NAME

Tasks = Mapping[tuple[str, int], Sequence[EvaluatedRollout]]


class EnvironmentSummary(msgspec.Struct, kw_only=True):
    """How the policy did in one environment.

    Attributes:
        num_tasks: tasks with rollouts.
        dropped: tasks without, by reason; they count nowhere else.
        estimates: `avg@k`, and `pass@1` to `pass@k` where the environment says what is solved; means over tasks.
        metrics: means over tasks of what else the environment says of a rollout.
        truncated: share of rollouts that a token limit ended.
        sampled_tokens: mean of a rollout; None without rollouts.
    """

    num_tasks: int
    dropped: dict[str, int]
    estimates: dict[str, Estimate]
    metrics: dict[str, float]
    truncated: float
    sampled_tokens: float | None


class Summary(msgspec.Struct, kw_only=True):
    """What came of an evaluation.

    Attributes:
        policy: who was evaluated.
        tasks: what was asked: seed, samples, sampling, environments.
        confidence: of the intervals.
        environments: by name.
    """

    format: int = FORMAT
    policy: dict[str, Any]
    tasks: dict[str, Any]
    confidence: float
    environments: dict[str, EnvironmentSummary]

    def encode(self) -> bytes:
        """Return the content of `summary.json`."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def metrics(self) -> dict[str, float]:
        """Return the numbers by slash-separated name, as in metrics.jsonl: `eval/<environment>/avg@8`."""
        found = {}
        for name, environment in self.environments.items():
            numbers = {key: one.value for key, one in environment.estimates.items()} | environment.metrics
            numbers["truncated"] = environment.truncated
            if environment.dropped:
                numbers["dropped"] = float(sum(environment.dropped.values()))
            found |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
        return found


def summarize(tasks: Tasks, identity: Mapping[str, Any], *, confidence: float) -> Summary:
    """Return the summary of whole tasks; the order in which they ended does not matter.

    Args:
        identity: what `evaluation.json` says.
    """
    samples, names = identity["samples_per_task"], identity["environments"]
    return Summary(
        policy=dict(identity["policy"]),
        tasks={key: value for key, value in identity.items() if key not in ("policy", "format")},
        confidence=confidence,
        environments={
            name: _of_environment(
                [group for key, group in sorted(tasks.items()) if key[0] == name], samples, confidence=confidence
            )
            for name in names
        },
    )


def read_evaluation(directory: Path) -> tuple[dict[str, Any], Tasks]:
    """Return what was evaluated in `directory`, and all its tasks.

    Raises:
        DataError: it holds no evaluation, or one that is not finished, or is damaged.
    """
    identity = read_identity(directory)
    path = directory / ROLLOUTS_NAME
    samples = identity["samples_per_task"]
    tasks = read_tasks(path, samples_per_task=samples)[0] if path.exists() else {}
    wanted = sum(section["num_tasks"] for section in identity["environments"].values())
    if len(tasks) != wanted:
        raise DataError(
            f"{directory} has {len(tasks)} of its {wanted} tasks: give the command that began it again, which goes on"
        )
    return identity, tasks


def summary_in(directory: Path) -> Summary:
    """Return the `summary.json` of an evaluation that is finished.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = directory / SUMMARY_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        raise DataError(f"{directory} holds no finished evaluation: it has no {SUMMARY_NAME}") from None
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged: {error}") from None


def estimates_of(groups: Sequence[Sequence[EvaluatedRollout]], samples: int) -> dict[str, list[float]]:
    """Return one value per task of `avg@k`, and of every `pass@k` where all rollouts say whether they solved it."""
    values = {f"avg@{samples}": [_mean([rollout.reward for rollout in group]) for group in groups]}
    if all(rollout.solved is not None for group in groups for rollout in group):
        solved = [sum(bool(rollout.solved) for rollout in group) for group in groups]
        for k in powers_up_to(samples):
            values[f"pass@{k}"] = [pass_at_k(samples, number, k) for number in solved]
    return values


def _of_environment(
    found: Sequence[Sequence[EvaluatedRollout]], samples: int, *, confidence: float
) -> EnvironmentSummary:
    dropped = Counter(group[0].dropped for group in found if group[0].dropped)
    groups = [group for group in found if not group[0].dropped]
    rollouts = [rollout for group in groups for rollout in group]
    if not rollouts:
        return EnvironmentSummary(
            num_tasks=0, dropped=dict(dropped), estimates={}, metrics={}, truncated=0.0, sampled_tokens=None
        )
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    return EnvironmentSummary(
        num_tasks=len(groups),
        dropped=dict(sorted(dropped.items())),
        estimates={
            name: mean_over_tasks(values, confidence=confidence)
            for name, values in estimates_of(groups, samples).items()
        },
        # Not every rollout need have each.
        metrics={name: _mean([one.metrics[name] for one in rollouts if name in one.metrics]) for name in names},
        truncated=_mean([rollout.truncated for rollout in rollouts]),
        sampled_tokens=_mean(lengths),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
