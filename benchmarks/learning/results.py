"""What was measured, as two CSV files and as tables."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

Curve = dict[int, float]
"""Held-out exact match, sampled at temperature 1, by step."""
NUMBERS = ("greedy", "pass@1", "pass@8")


@dataclass(frozen=True)
class Estimate:
    """A share of held-out tasks, with its interval of 95 % over tasks."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Run:
    """One learning run.

    Attributes:
        task: name of the environment.
        variant: algorithm or control.
        seed: of the run.
        before, after: by NUMBERS, on held-out tasks.
        curve: meanwhile.
        step_s: median of the seconds of a step; None of runs that were made before this was measured.
    """

    task: str
    variant: str
    seed: int
    before: dict[str, Estimate]
    after: dict[str, Estimate]
    curve: Curve
    step_s: float | None = None


def write_runs(folder: Path, runs: Iterable[Run]) -> None:
    """Write `estimates.csv`, `curves.csv` and `seconds.csv`; of two runs of one task, variant and seed the first."""
    kept: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        kept.setdefault((run.task, run.variant, run.seed), run)
    ordered = [kept[key] for key in sorted(kept)]
    with (folder / "estimates.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["task", "variant", "seed", "when", "number", "value", "low", "high"])
        for run in ordered:
            for when, estimates in (("before", run.before), ("after", run.after)):
                for name in NUMBERS:
                    one = estimates[name]
                    shown = [f"{value:.5g}" for value in (one.value, one.low, one.high)]
                    rows.writerow([run.task, run.variant, run.seed, when, name, *shown])
    with (folder / "curves.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["task", "variant", "seed", "step", "exact"])
        for run in ordered:
            rows.writerows([run.task, run.variant, run.seed, step, f"{value:.5g}"] for step, value in run.curve.items())

    with (folder / "seconds.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["task", "variant", "seed", "step_s"])
        rows.writerows([run.task, run.variant, run.seed, f"{run.step_s:.5g}"] for run in ordered if run.step_s)


def read_runs(folder: Path) -> list[Run]:
    """Return what `write_runs` wrote, by task, variant and seed; nothing where nothing was written."""
    if not (folder / "estimates.csv").exists():
        return []
    curves: dict[tuple[str, str, int], Curve] = {}
    for row in _rows(folder / "curves.csv"):
        curves.setdefault(_key(row), {})[int(row["step"])] = float(row["exact"])
    seconds = {}
    if (folder / "seconds.csv").exists():
        seconds = {_key(row): float(row["step_s"]) for row in _rows(folder / "seconds.csv")}
    runs = []
    for key, rows in groupby(_rows(folder / "estimates.csv"), key=_key):
        found: dict[str, dict[str, Estimate]] = {"before": {}, "after": {}}
        for row in rows:
            estimate = Estimate(*(float(row[name]) for name in ("value", "low", "high")))
            found[row["when"]][row["number"]] = estimate
        runs.append(Run(*key, found["before"], found["after"], curves[key], seconds.get(key)))
    return runs


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _key(row: dict[str, str]) -> tuple[str, str, int]:
    return row["task"], row["variant"], int(row["seed"])


def table(runs: Sequence[Run]) -> str:
    """Return a Markdown table with a line for each run: held-out numbers before and after, with intervals."""
    columns = ["task", "variant", "seed", "steps"]
    columns += [column for name in NUMBERS for column in (f"{name} before", "after")]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for run in runs:
        cells = [f"`{run.task}`", f"`{run.variant}`", str(run.seed), str(max(run.curve))]
        cells += [_shown(when[name]) for name in NUMBERS for when in (run.before, run.after)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(one: Estimate) -> str:
    return f"{one.value:.3f} [{one.low:.2f}, {one.high:.2f}]"


def summary(runs: Sequence[Run]) -> str:
    """Return a Markdown table with a line for each task and variant: means over the seeds, least and largest.

    docs/evidence.md shows those of `grpo` and `trl`.
    """
    lines = ["| task | variant | seeds | greedy before | after | pass@1 before | after |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (task, variant), group in groupby(runs, key=lambda run: (run.task, run.variant)):
        of_seeds = list(group)
        cells = [
            cell
            for name in ("greedy", "pass@1")
            for cell in (f"{of_seeds[0].before[name].value:.3f}", _spread([run.after[name].value for run in of_seeds]))
        ]
        lines.append(f"| {' | '.join([f'`{task}`', f'`{variant}`', str(len(of_seeds)), *cells])} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"
