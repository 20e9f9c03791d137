"""Learning curves as a CSV file, a picture and a table."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.algorithms.runs import METRICS, NAMES

REWARD = "reward/mean"
# The end of a curve of `rl` is the mean of this many batches, of 16 problems each.
_LAST_STEPS = 5


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        algorithm: a key of NAMES.
        seed: of the run.
        points: metrics by step, in the order of the steps.
    """

    algorithm: str
    seed: int
    points: dict[int, dict[str, float]]

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every step."""
        return [point[REWARD] for point in self.points.values()]

    @property
    def start(self) -> float:
        """Mean reward of the first point: the weights are those that all runs start from."""
        return self.rewards[0]

    @property
    def end(self) -> float:
        """Mean reward of the last steps; of `dpo` the last point, which has as many rollouts as four batches."""
        return statistics.fmean(self.rewards[-1 if self.algorithm == "dpo" else -_LAST_STEPS :])


def write_curves(path: Path, curves: Sequence[Curve]) -> None:
    """Write curves as CSV, one row for each step; of two of one algorithm and seed the first."""
    kept: dict[tuple[str, int], Curve] = {}
    for curve in curves:
        kept.setdefault((curve.algorithm, curve.seed), curve)
    ordered = sorted(kept.values(), key=lambda curve: (list(NAMES).index(curve.algorithm), curve.seed))
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["algorithm", "seed", "step", *METRICS])
        for curve in ordered:
            for step, point in curve.points.items():
                values = [f"{point[name]:.5g}" if point.get(name) is not None else "" for name in METRICS]
                rows.writerow([curve.algorithm, curve.seed, step, *values])


def read_curves(path: Path) -> list[Curve]:
    """Return what `write_curves` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Curve(algorithm, int(seed), {int(row["step"]): _metrics(row) for row in group})
        for (algorithm, seed), group in groupby(rows, key=lambda row: (row["algorithm"], row["seed"]))
    ]


def _metrics(row: dict[str, str]) -> dict[str, float]:
    return {name: float(row[name]) for name in METRICS if row[name]}


def summary(curves: Sequence[Curve]) -> str:
    """Return the table: reward at the start and the end, mean and sample std over the seeds, and the rise."""
    lines = [f"{'':12s} {'seeds':>5s}  {'start':>13s}  {'end':>13s}  {'rise':>13s}  {'least rise':>10s}"]
    for algorithm, group in groupby(curves, key=lambda curve: curve.algorithm):
        of_seeds = list(group)
        rises = [curve.end - curve.start for curve in of_seeds]
        columns = [[curve.start for curve in of_seeds], [curve.end for curve in of_seeds], rises]
        shown = "  ".join(f"{_spread(column):>13s}" for column in columns)
        lines.append(f"{NAMES[algorithm]:12s} {len(of_seeds):5d}  {shown}  {min(rises):10.3f}")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the reward by step, one panel for each algorithm, one line for each seed, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_algorithm = {name: list(group) for name, group in groupby(curves, key=lambda curve: curve.algorithm)}
    num_columns = min(5, len(by_algorithm))
    num_rows = -(-len(by_algorithm) // num_columns)
    figure = Figure(figsize=(2.6 * num_columns, 2.3 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(by_algorithm) :]:
        panel.set_axis_off()
    for panel, (algorithm, of_seeds) in zip(panels.flat, by_algorithm.items(), strict=False):
        marker = "o" if algorithm == "dpo" else ""
        for curve in of_seeds:
            panel.plot(list(curve.points), curve.rewards, linewidth=1, marker=marker, markersize=3,
                       label=f"seed {curve.seed}")  # fmt: skip
        panel.set_title(NAMES[algorithm], fontsize=10)
        panel.grid(alpha=0.3)
    panels.flat[0].legend(fontsize=7, loc="lower right")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(path, dpi=100)
