"""Decides which metrics make which charts of a report, and builds the timeline of a run's processes and restarts."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.run.timeline import Span
from holdfast.view.report.columns import (
    MAX_POINTS,
    Block,
    Chart,
    Lanes,
    Mark,
    Numbers,
    Series,
    colour_of,
    means_of_stretches,
    points,
    thin_out,
)
from holdfast.view.report.run_data import Event, RunData
from holdfast.view.state import LAUNCHER

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


# Each its own: what stands beside each other is one hue, in other shades.
PHASE_COLOURS = {
    "generate": colour_of(4), "forward_backward": colour_of(0), "reference": "#004B75",
    "optimizer": colour_of(3), "write_batch": "#7A3300",
    "publish_weights": colour_of(5), "update_weights": "#8A4A70",
    "save": colour_of(2), "checkpoint": "#00543D",
    "evaluate": colour_of(1), "validation": "#946600", "critic": "#F4C870",
    "experience": colour_of(6), "forward": "#6E6400", "data": "#DCD27A",
    "start-up": colour_of(7),
}  # fmt: skip
_WAITING = "#BBBBBB"


def colour_of_phase(name: str, number: int) -> str:
    """Return the colour of a phase, the same in every chart; grey for waits."""
    if name == "other":
        return colour_of(7)
    if name.startswith("wait_"):
        return _WAITING
    return PHASE_COLOURS.get(name, colour_of(number))


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


MAX_BLOCKS = 6000
_STRETCHES = 1500
_ORDER = ("trainer", "orchestrator", "inference", "evaluation")


def lanes_of(run: RunData, *, key: str, alone: bool) -> Lanes | None:
    """Return the timeline of one run; None where nothing was recorded."""
    spans = [one for one in run.spans if one.name != "start"]
    lanes: dict[str, list[Block]] = {}
    for one in spans:
        lane = f"{one.process}: {one.lane}" if one.lane else one.process
        lanes.setdefault(lane, []).append(Block(lane, one.name, one.begin, one.end, _text(one)))
    for block in _starts(run):
        lanes.setdefault(block.lane, []).append(block)
    if not lanes:
        return None
    whole = sum(map(len, lanes.values()))
    note = "what is not coloured is idle"
    if run.later_attempts:
        note += "; dotted lines with a number: where that attempt of the run began"
    if whole > MAX_BLOCKS:
        begin = min(block.begin for blocks in lanes.values() for block in blocks)
        end = max(block.end for blocks in lanes.values() for block in blocks)
        lanes = {name: _merged(blocks, begin, end) for name, blocks in lanes.items()}
        note += (
            f"; {whole:,} spans are too many to draw: each stretch of {(end - begin) / _STRETCHES:.3g} s shows what "
            "took most of it"
        )
    names = sorted(lanes, key=lambda name: (_rank(name), name))
    blocks = [block for name in names for block in lanes[name]]
    kinds = list(dict.fromkeys(block.name for block in blocks))
    return Lanes(
        key,
        "Timeline" if alone else f"Timeline: {run.name}",
        names,
        blocks,
        {kind: colour_of_phase(kind, number) for number, kind in enumerate(kinds)},
        _marks(run),
        note,
    )


def _rank(lane: str) -> int:
    return next((number for number, name in enumerate(_ORDER) if lane.startswith(name)), len(_ORDER))


def _text(one: Span) -> str:
    told = [f"step {one.step}"] if one.step is not None else []
    told += [f"version {one.version}"] if one.version is not None else []
    told += [f"{one.count} of them"] if one.count > 1 else []
    return ", ".join([one.name, *told, f"{one.end - one.begin:.3g} s"])


def _starts(run: RunData) -> Iterable[Block]:
    """Yield the start-ups, from the first word of a process to its first span, or to the last word."""
    begun = {(one.attempt, one.process): one.begin for one in reversed(run.spans)}
    by_process = lambda event: (event.attempt, event.process)  # noqa: E731 - a key, twice
    for (attempt, process), events in itertools.groupby(sorted(run.events, key=by_process), by_process):
        told = [event for event in events if not event.is_alarm]
        if process in ("", LAUNCHER) or not told:  # the launcher tells of others, and how the attempt ended
            continue
        end = begun.get((attempt, process), _ready(told))
        if end > told[0].time:
            text = f"start-up, attempt {attempt}, {end - told[0].time:.3g} s"
            yield Block(process, "start-up", told[0].time, end, text)


def _ready(events: Sequence[Event]) -> float:
    return next((event.time for event in events if event.phase == "ready"), events[-1].time)


def _marks(run: RunData) -> list[Mark]:
    """Return the starts of attempts, and of processes that were started again within one."""
    marks = [Mark(one.begin, str(one.number)) for one in run.later_attempts if one.begin is not None]
    seen: set[tuple[int, str]] = set()
    for one in run.spans:
        if one.name != "start":
            continue
        place = (one.attempt, one.process)
        if place in seen:
            marks.append(Mark(one.begin, f"{one.process} again", colour_of(3)))
        seen.add(place)
    return marks


def _merged(blocks: Sequence[Block], begin: float, end: float) -> list[Block]:
    """Return one block for each run of stretches of which the same took most; none where that was nothing."""
    width = (end - begin) / _STRETCHES
    kinds = list(dict.fromkeys(block.name for block in blocks))
    seconds = np.zeros((len(kinds) + 1, _STRETCHES))
    for block in blocks:
        row = kinds.index(block.name)
        first = min(_STRETCHES - 1, int((block.begin - begin) / width))
        last = min(_STRETCHES - 1, int((block.end - begin) / width))
        if first == last:
            seconds[row, first] += block.end - block.begin
            continue
        seconds[row, first] += begin + (first + 1) * width - block.begin
        seconds[row, first + 1 : last] += width
        seconds[row, last] += block.end - (begin + last * width)
    seconds[-1] = width - seconds[:-1].sum(axis=0)
    merged = []
    position = 0
    for row, stretches in itertools.groupby(seconds.argmax(axis=0)):
        length = len(list(stretches))
        if row < len(kinds):
            since = begin + position * width
            name = kinds[row]
            merged.append(Block(blocks[0].lane, name, since, since + length * width, f"mostly {name}"))
        position += length
    return merged
