"""Which metrics make which curves."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.commands.report.charts import Chart, Mark, Series, colour_of, points
from holdfast.commands.report.columns import MAX_POINTS, Numbers, means_of_stretches, thin_out
from holdfast.commands.report.run_data import RunData

_MAX_OTHERS = 120
_STACK_POINTS = 300
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Curves:
    """A chart of the metrics whose names match `patterns`, as far as a run has them; `*` matches anything.

    Attributes:
        least: there is no chart with fewer metrics.
    """

    key: str
    title: str
    unit: str
    patterns: tuple[str, ...]
    least: int = 1


LEARNING = (
    Curves("reward", "Reward", "reward", ("reward/mean", "reward/shaped/mean", "reward_model/mean")),
    Curves("loss", "Loss", "loss", ("loss", "val/loss", "pretraining_loss", "value_loss")),
    Curves("kl", "KL divergences", "nats per token", ("mismatch_kl", "ref_kld", "ppo_kl", "kl", "distillation/kl")),
    Curves("entropy", "Entropy", "nats per token", ("entropy",)),
    Curves("preferences", "Rewards of answers", "reward", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    Curves("accuracy", "Preferred answers told", "share", ("rewards/accuracies", "val/rewards/accuracies")),
    Curves("lengths", "Lengths", "tokens",
           ("rollout/tokens_mean", "rollout/tokens_max", "rollout/sampled_tokens_mean")),
    Curves("solved", "Solved in training", "share", ("*/pass@*",)),
    Curves("environments", "Reward by environment", "reward", ("reward/*/mean",), least=2),
    Curves("shares", "Shares of groups, rollouts and tokens", "share",
           ("groups/zero_variance", "rollout/truncated", "clip_fraction", "ratio/truncated", "correction/bounded")),
    Curves("advantage", "Advantages", "advantage", ("advantage/std", "advantage/max_abs")),
    Curves("staleness", "Age of the policy that sampled", "versions", ("staleness/mean", "staleness/max")),
    Curves("grad_norm", "Norm of the gradient", "norm", ("grad_norm", "value_grad_norm")),
    Curves("lr", "Learning rate", "per step", ("lr", "value_lr")),
)  # fmt: skip

SPEED = (
    Curves("throughput", "Throughput", "tokens / s", ("tokens_per_s", "sampled_tokens_per_s")),
    Curves("memory", "Memory of a rank", "GiB", ("memory_gib",)),
    Curves("engine_idle", "Idle share of the engines", "share", ("engine/idle_share",)),
)

_OF_ORCHESTRATOR = ("wait_for_weights", "update_weights", "generate", "evaluate")
_WHOLES = {"trainer": "time/step", "orchestrator": "time/batch"}


def attempt_marks(runs: Sequence[RunData]) -> list[Mark]:
    """Return where each attempt of a run but the first went on, by step."""
    alone = len(runs) == 1
    return [
        Mark(one.resume_step, str(one.number) if alone else "", colour_of(7 if alone else number))
        for number, run in enumerate(runs)
        for one in run.later_attempts
    ]


def charts_of(groups: Sequence[Curves], runs: Sequence[RunData]) -> list[Chart]:
    """Return the charts of which a run has at least one curve with a point."""
    named = [(one, _names(one.patterns, runs)) for one in groups]
    charts = [_chart(one.key, one.title, one.unit, names, runs) for one, names in named if len(names) >= one.least]
    return [chart for chart in charts if chart.series]


def others(runs: Sequence[RunData], shown: Sequence[Curves]) -> tuple[list[Chart], int]:
    """Return a chart for each metric that is in none of `shown`, of the first so many names, and how many are left."""
    taken = {name for one in shown for name in _names(one.patterns, runs)} | {"samples", "tokens"}
    names = sorted({name for run in runs for name in run.metrics.values} - taken)
    charts = [_chart(f"other_{number}", name, "", [name], runs) for number, name in enumerate(names[:_MAX_OTHERS])]
    return [chart for chart in charts if chart.series], max(0, len(names) - _MAX_OTHERS)


def _names(patterns: Sequence[str], runs: Sequence[RunData]) -> list[str]:
    there = list(dict.fromkeys(name for run in runs for name in run.metrics.values))
    found = [name for pattern in patterns for name in there if fnmatch.fnmatchcase(name, pattern)]
    whole = "reward/shaped/mean"  # which is of no environment
    return [name for name in dict.fromkeys(found) if name != whole or whole in patterns]


def _chart(key: str, title: str, unit: str, names: Sequence[str], runs: Sequence[RunData]) -> Chart:
    """Return the curves of some metrics: with one run a colour for each metric, else one for each run."""
    series: list[Series] = []
    thinned, nulls = False, 0
    for number, run in enumerate(runs):
        for position, name in enumerate(names):
            if name not in run.metrics.values:
                continue
            nulls += run.metrics.nulls.get(name, 0)
            whole_x, whole_y = run.metrics.curve(name)
            if not len(whole_x):
                continue
            x, y = thin_out(whole_x, whole_y)
            thinned = thinned or len(x) < len(whole_x)
            alone = len(runs) == 1
            series.append(
                Series(
                    name if alone else f"{run.name}: {name}" if len(names) > 1 else run.name,
                    x,
                    y,
                    colour_of(position if alone else number),
                    dash="solid" if alone else _DASHES[position % len(_DASHES)],
                    # So that of two runs that are the same to the bit both are seen.
                    width=1.6 if alone else 1.6 + 2.4 * (len(runs) - 1 - number) / (len(runs) - 1),
                    shows_points=len(x) < 40,
                )
            )
    notes = [f"{nulls} values are no finite numbers and not drawn"] if nulls else []
    if thinned:
        notes.append(f"long curves show the least and the greatest of each of {MAX_POINTS // 2 - 1} stretches")
    return Chart(key, title, unit, series, attempt_marks(runs), note="; ".join(notes))


def phase_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the phases of a step as stacks, of the trainer and of the orchestrator of every run."""
    found = []
    for number, run in enumerate(runs):
        for process, whole in _WHOLES.items():
            chart = _phases(run, process, whole, number=None if len(runs) == 1 else number)
            if chart is not None:
                found.append(chart)
    return found


def _phases(run: RunData, process: str, whole: str, *, number: int | None) -> Chart | None:
    metrics = run.metrics
    if whole not in metrics.values:
        return None
    of_orchestrator = [f"time/{name}" for name in _OF_ORCHESTRATOR]
    names = [
        name
        for name in metrics.values
        if name.startswith("time/")
        and name not in _WHOLES.values()
        and (name in of_orchestrator) == (process == "orchestrator")
    ]
    columns = [np.nan_to_num(metrics.values[name]) for name in [*names, whole]]
    x, means, size = means_of_stretches(metrics.steps, columns, limit=_STACK_POINTS)
    rest = np.maximum(0.0, means[-1] - sum(means[:-1], np.zeros_like(x)))
    parts = [(name.removeprefix("time/"), mean) for name, mean in zip(names, means, strict=False)]
    series = [
        Series(name, x, mean, colour_of_phase(name, place))
        for place, (name, mean) in enumerate([*parts, ("other", rest)])
        if mean.any()
    ]
    head = f"Phases of a step: {process}" if process == "trainer" else "Phases of a batch: orchestrator"
    notes = [f"each bar is the mean of {size} steps"] if size > 1 else []
    top = _top_of(means[-1])
    if top is not None:
        notes.append(
            f"{int((means[-1] > top).sum())} bars are higher than the chart, the highest {means[-1].max():.3g} s"
        )
    return Chart(
        f"phases_{process}" if number is None else f"phases_{process}_{number}",
        head if number is None else f"{head}, {run.name}",
        "seconds",
        series,
        attempt_marks([run]),
        is_stack=True,
        note="; ".join(notes),
        top=top,
    )


def _top_of(totals: Numbers) -> float | None:
    """Return where to end the axis such that a few long steps, as the first, do not press the others flat."""
    usual = float(np.quantile(totals, 0.9))
    return 1.5 * usual if usual > 0 and totals.max() > 4 * usual else None


_PHASE_COLOURS = {
    "generate": 4, "forward_backward": 0, "optimizer": 3, "publish_weights": 5, "update_weights": 5, "save": 2,
    "checkpoint": 2, "evaluate": 1, "validation": 1, "experience": 6, "forward": 6, "data": 6, "critic": 1,
    "write_batch": 3, "start-up": 7,
}  # fmt: skip
_WAITING = "#BBBBBB"


def colour_of_phase(name: str, number: int) -> str:
    """Return the colour of a phase, the same in every chart; grey for waits."""
    if name == "other":
        return colour_of(7)
    if name.startswith("wait_"):
        return _WAITING
    return colour_of(_PHASE_COLOURS.get(name, number))


def evaluation_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return every estimate of every environment over the versions that were evaluated, with its interval."""
    places = dict.fromkeys(
        (environment, name)
        for run in runs
        for summary in run.summaries.values()
        for environment, one in summary.environments.items()
        for name in one.estimates
    )
    charts: dict[str, Chart] = {}
    for environment, name in places:
        chart = charts.setdefault(
            environment,
            Chart(f"evaluation_{len(charts)}", f"Held-out tasks: {environment}", "mean over tasks", [],
                  attempt_marks(runs), note="bars are confidence intervals"),
        )  # fmt: skip
        for number, run in enumerate(runs):
            series = _estimates(run, environment, name, alone=len(runs) == 1, number=number, chart=chart)
            if series is not None:
                chart.series.append(series)
    return [chart for chart in charts.values() if chart.series]


def _estimates(run: RunData, environment: str, name: str, *, alone: bool, number: int, chart: Chart) -> Series | None:
    found = [
        (version, summary.environments[environment].estimates[name])
        for version, summary in sorted((at, one) for at, one in run.summaries.items() if at is not None)
        if environment in summary.environments and name in summary.environments[environment].estimates
    ]
    if not found:
        return None
    estimates = [one for _, one in found]
    return Series(
        name if alone else f"{run.name}: {name}",
        points([float(version) for version, _ in found]),
        points([one.value for one in estimates]),
        colour_of(len(chart.series) if alone else number),
        low=points([one.value if one.low is None else one.low for one in estimates]),
        high=points([one.value if one.high is None else one.high for one in estimates]),
        dash="solid"
        if alone
        else _DASHES[sum(one.name.startswith(f"{run.name}: ") for one in chart.series) % len(_DASHES)],
        shows_points=True,
    )


def shown_number(value: float | None) -> str:
    """Return a number for a table."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"
