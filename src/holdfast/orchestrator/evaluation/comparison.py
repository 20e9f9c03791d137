"""Two evaluations of the same tasks, side by side: the difference per environment, with a paired test over tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.orchestrator.evaluation.estimates import Estimate, PairedDifference, mean_over_tasks, paired_difference
from holdfast.orchestrator.evaluation.results import EvaluatedRollout
from holdfast.orchestrator.evaluation.summary import Tasks, estimates_of, read_evaluation
from holdfast.shared.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """One number of one environment in both evaluations.

    Attributes:
        name: `avg@8`, `pass@1`; `avg@8 / avg@4` where they have different numbers of samples.
        num_tasks: that both have rollouts of.
    """

    environment: str
    name: str
    num_tasks: int
    first: Estimate
    second: Estimate
    paired: PairedDifference


@dataclass(frozen=True)
class Comparison:
    """What `evaluate --compare` says.

    Attributes:
        policies: of the two evaluations.
        differing: settings in which they differ, both values of each; the tasks are the same.
        lines: by environment and number.
        skipped: tasks that one of them has dropped.
    """

    policies: tuple[dict[str, Any], dict[str, Any]]
    differing: dict[str, tuple[Any, Any]]
    lines: list[Line]
    skipped: int


def compare(first: Path, second: Path, *, confidence: float = 0.95) -> Comparison:
    """Compare two finished evaluations.

    Raises:
        DataError: a directory holds none, or one that is not finished.
        ConfigError: they did not ask the same tasks.
    """
    identities, tasks = zip(*(read_evaluation(directory) for directory in (first, second)), strict=True)
    _require_same_tasks(identities, tasks, (first, second))
    lines: list[Line] = []
    skipped = 0
    for name in identities[0]["environments"]:
        pairs = [(tasks[0][key], tasks[1][key]) for key in sorted(tasks[0]) if key[0] == name]
        both = [pair for pair in pairs if not pair[0][0].dropped and not pair[1][0].dropped]
        skipped += len(pairs) - len(both)
        if both:
            lines += _lines(name, both, [identity["samples_per_task"] for identity in identities], confidence)
    settings = ("samples_per_task", "sampling", "seq_len")
    differing = {
        key: (identities[0][key], identities[1][key]) for key in settings if identities[0][key] != identities[1][key]
    }
    return Comparison((identities[0]["policy"], identities[1]["policy"]), differing, lines, skipped)


def _lines(
    environment: str,
    pairs: Sequence[tuple[Sequence[EvaluatedRollout], Sequence[EvaluatedRollout]]],
    samples: Sequence[int],
    confidence: float,
) -> list[Line]:
    values = [estimates_of([pair[side] for pair in pairs], samples[side]) for side in (0, 1)]
    averages = [f"avg@{number}" for number in samples]
    # avg@k means the same for every k, pass@k does not.
    names = [tuple(averages), *((name, name) for name in values[0] if name in values[1] and name not in averages)]
    return [
        Line(
            environment,
            one if one == other else f"{one} / {other}",
            len(pairs),
            mean_over_tasks(values[0][one], confidence=confidence),
            mean_over_tasks(values[1][other], confidence=confidence),
            paired_difference(values[0][one], values[1][other], confidence=confidence),
        )
        for one, other in names
    ]


def _require_same_tasks(
    identities: Sequence[Mapping[str, Any]], tasks: Sequence[Tasks], places: Sequence[Path]
) -> None:
    for key in ("seed", "environments"):
        if identities[0][key] != identities[1][key]:
            raise ConfigError(
                f"--compare: {places[0]} and {places[1]} did not ask the same tasks: {key} = {identities[0][key]} and "
                f"{identities[1][key]}. Evaluate both with the same seed, environments and num_tasks."
            )
    for key, group in tasks[0].items():
        prompts = [group[0].prompt, tasks[1][key][0].prompt]
        if all(prompts) and prompts[0] != prompts[1]:
            raise ConfigError(
                f"--compare: task {key[1]} of '{key[0]}' has another prompt in {places[0]} than in {places[1]}: the "
                "environment, its data or the tokenizer changed in between. Evaluate both anew."
            )
