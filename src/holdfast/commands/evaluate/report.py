"""What `evaluate` shows: the numbers of one evaluation, or of two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from holdfast.commands.live.output import json_lines
from holdfast.commands.tables import Grid, Report, number
from holdfast.orchestrator.evaluation.comparison import Comparison
from holdfast.orchestrator.evaluation.estimates import Estimate
from holdfast.orchestrator.evaluation.summary import Summary


def summary_report(summary: Summary, directory: Path) -> Report:
    """Return the report of one evaluation: a line per environment and estimate."""
    percent = f"{100 * summary.confidence:g}% interval"
    rows: list[tuple[str, ...]] = []
    more: list[str] = []
    for name, environment in summary.environments.items():
        rows += [
            (name, str(environment.num_tasks), key, number(one.value), interval_of(one))
            for key, one in environment.estimates.items()
        ]
        numbers = {**environment.metrics, "truncated": environment.truncated}
        if environment.sampled_tokens is not None:
            numbers["sampled tokens"] = environment.sampled_tokens
        more.append(f"{name}: " + ", ".join(f"{key} {number(value)}" for key, value in numbers.items()))
        if environment.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in environment.dropped.items())
            more.append(f"{name}: tasks without rollouts, which count nowhere above: {reasons}")
    grid = Grid(("environment", ">tasks", "estimate", ">value", percent), rows)
    return Report(msgspec.to_builtins(summary), [grid, *more, f"every rollout: {directory}"])


def tell_result(summary: Summary, directory: Path, *, step: int | None) -> None:
    """Print the report of one evaluation, or the object of type `result` that says the same to programs.

    Args:
        step: of the run, whose weights they were; None: those of a model.
    """
    if (lines := json_lines()) is not None:
        lines.emit("result", step=step, summary=msgspec.to_builtins(summary))
    else:
        summary_report(summary, directory).print(as_json=False)


def comparison_report(comparison: Comparison, first: Path, second: Path) -> Report:
    """Return the report of two evaluations."""
    rows = [
        (
            line.environment,
            line.name,
            str(line.num_tasks),
            f"{number(line.first.value)} {interval_of(line.first)}",
            f"{number(line.second.value)} {interval_of(line.second)}",
            f"{line.paired.difference.value:+.4g} {interval_of(line.paired.difference)}",
            f"{line.paired.p_value:.2g}",
            f"{line.paired.num_higher}/{line.paired.num_lower}",
        )
        for line in comparison.lines
    ]
    columns = ("environment", "estimate", ">tasks", "A", "B", "B - A", ">p", ">higher/lower")
    parts: list[Grid | str] = [
        f"A  {first}  {_shown(comparison.policies[0])}",
        f"B  {second}  {_shown(comparison.policies[1])}",
        Grid(columns, rows, expendable=("higher/lower",)),
    ]
    for key, (one, other) in comparison.differing.items():
        parts.append(f"they differ in {key}: A {_plain(one)}, B {_plain(other)}")
    if comparison.skipped:
        parts.append(f"{comparison.skipped} tasks are left out, which one of them has no rollouts of")
    document = {
        "first": str(first),
        "second": str(second),
        "policies": list(comparison.policies),
        "differing": {key: list(values) for key, values in comparison.differing.items()},
        "skipped": comparison.skipped,
        "lines": msgspec.to_builtins(comparison.lines),
    }
    return Report(document, parts)


def interval_of(estimate: Estimate) -> str:
    """Return an interval for people; `-` where there is none."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{number(estimate.low)}, {number(estimate.high)}]"


def _shown(policy: dict[str, Any]) -> str:
    return " ".join(f"{key} {value}" for key, value in policy.items() if key != "kind" and value is not None)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    return number(value) if isinstance(value, float) else str(value)
