"""The charts of a report, as figures of plotly.js without the theme, which the page sets."""

import fnmatch
import html
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.orchestrator.evaluation.statistics import Estimate
from holdfast.run.timeline import Span
from holdfast.view.run_data import Numbers, RunData

MAX_POINTS = 1000
MAX_BLOCKS = 6000
_MAX_OTHERS = 120
_MAX_BARS = 300
_FEW_POINTS = 40
_LABEL_SHARE = 0.025
_MS = 1000.0
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#B8A800", "#888888")
"""Okabe and Ito 2008, "Color Universal Design": also for readers who see colours differently."""
_GREY = PALETTE[-1]
_WAITING = "#BBBBBB"
_DASHES = ("solid", "dash", "dot", "dashdot")
PHASE_COLOURS = {
    "generate": PALETTE[4], "forward_backward": PALETTE[0], "reference": "#004B75",
    "optimizer": PALETTE[3], "write_batch": "#7A3300",
    "publish_weights": PALETTE[5], "update_weights": "#8A4A70",
    "save": PALETTE[2], "checkpoint": "#00543D",
    "evaluate": PALETTE[1], "validation": "#946600", "critic": "#F4C870",
    "experience": PALETTE[6], "forward": "#6E6400", "data": "#DCD27A",
    "start-up": _GREY,
}  # fmt: skip
"""Neighbouring phases have one hue, in other shades."""
_LANES = ("trainer", "orchestrator", "inference", "evaluation")
_OF_ORCHESTRATOR = [f"time/{name}" for name in ("wait_for_weights", "update_weights", "generate", "evaluate")]
_WHOLES = {"trainer": "time/step", "orchestrator": "time/batch"}


class Chart(NamedTuple):
    """One chart; `key` names it in the page and the picture's file, `note` says how to read it."""

    key: str
    title: str
    figure: dict[str, Any]
    note: str = ""
    is_timeline: bool = False


class Curves(NamedTuple):
    """A chart of the metrics whose names match `patterns`, if a run has at least `least` of them."""

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


def colour_of(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def colour_of_phase(name: str, number: int) -> str:
    """Return the colour of a phase, the same in every chart; light grey for waits."""
    if name.startswith("wait_"):
        return _WAITING
    return _GREY if name == "other" else PHASE_COLOURS.get(name, colour_of(number))


def charts_of(groups: Sequence[Curves], runs: Sequence[RunData]) -> list[Chart]:
    """Return the charts of which a run has a curve."""
    named = [(group, _names(group.patterns, runs)) for group in groups]
    charts = [_chart(group, names, runs) for group, names in named if len(names) >= group.least]
    return [chart for chart in charts if chart is not None]


def others(runs: Sequence[RunData], shown: Sequence[Curves]) -> tuple[list[Chart], int]:
    """Return a chart for each metric that is not in `shown`, at most so many, and how many are left out."""
    taken = {name for group in shown for name in _names(group.patterns, runs)} | {"samples", "tokens"}
    names = sorted({name for run in runs for name in run.metrics.values} - taken)
    charts = charts_of(
        [Curves(f"other_{number}", name, "", (name,)) for number, name in enumerate(names[:_MAX_OTHERS])], runs
    )
    return charts, max(0, len(names) - _MAX_OTHERS)


def _names(patterns: Sequence[str], runs: Sequence[RunData]) -> list[str]:
    there = list(dict.fromkeys(name for run in runs for name in run.metrics.values))
    found = [name for pattern in patterns for name in there if name == pattern or fnmatch.fnmatchcase(name, pattern)]
    whole = "reward/shaped/mean"  # of all environments
    return [name for name in dict.fromkeys(found) if name != whole or whole in patterns]


def _chart(group: Curves, names: Sequence[str], runs: Sequence[RunData]) -> Chart | None:
    traces = []
    for number, run in enumerate(runs):
        for position, name in enumerate(names):
            steps, values = run.metrics.curve(name)
            title = name if len(runs) == 1 else f"{run.name}: {name}" if len(names) > 1 else run.name
            if len(steps):
                traces.append(_line(title, *thin_out(steps, values), runs, number, position))
    return Chart(group.key, group.title, _figure(traces, group.unit, runs)) if traces else None


def thin_out(x: Numbers, y: Numbers, *, limit: int = MAX_POINTS) -> tuple[Numbers, Numbers]:
    """Return at most `limit` points of a curve, (N,) each: both ends, and least and greatest of each stretch.

    No spike is lost."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(1, len(x) - 1, (limit - 2) // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in itertools.pairwise(edges):
        part = y[begin:end]
        kept |= {begin + int(part.argmin()), begin + int(part.argmax())}
    indices = np.array(sorted(kept))
    return x[indices], y[indices]


def _line(name: str, x: Numbers, y: Numbers, runs: Sequence[RunData], number: int, position: int) -> dict[str, Any]:
    """Return a curve, (N,) each, of run `number`. One run has a colour for each position, else each run has one."""
    is_single = len(runs) == 1
    colour = colour_of(position if is_single else number)
    # The first runs are wider, so that two equal curves are both seen.
    width = 1.6 if is_single else 1.6 + 2.4 * (len(runs) - 1 - number) / (len(runs) - 1)
    dash = "solid" if is_single else _DASHES[position % len(_DASHES)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < _FEW_POINTS else "lines",
        "name": _escaped(name),
        "x": x.astype(int).tolist(),
        "y": _numbers(y),
        "line": {"color": colour, "dash": dash, "width": width},
        "marker": {"size": 5, "color": colour},
    }


def _figure(traces: list[dict[str, Any]], unit: str, runs: Sequence[RunData]) -> dict[str, Any]:
    """Return a figure over steps, with a dotted line where each later attempt of a run resumed."""
    marks = [
        (float(attempt.resume_step), str(attempt.number) if len(runs) == 1 else "",
         _GREY if len(runs) == 1 else colour_of(number))
        for number, run in enumerate(runs)
        for attempt in run.later_attempts
        if attempt.resume_step is not None
    ]  # fmt: skip
    steps = [step for trace in traces for step in trace["x"]]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}},
        "showlegend": len(traces) > 1,
        **_marked(marks, min(steps), max(steps)),
    }
    values = {value for trace in traces for value in trace["y"]}
    if len(values) == 1:  # else plotly's axis would reach from value - 1 to value + 1
        (value,) = values
        layout["yaxis"]["range"] = sorted((0.0, 2 * value)) if value else [-1, 1]
    return {"data": traces, "layout": layout}


def _marked(marks: Sequence[tuple[float, str, str]], low: float, high: float) -> dict[str, Any]:
    """Return dotted lines at marks (x, text, colour), with the texts that do not overlap the one before."""
    lines = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1,
         "line": {"color": colour, "width": 1.2, "dash": "dot"}}
        for x, _, colour in marks
    ]  # fmt: skip
    place = {"y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 10}}
    labels, end = [], -math.inf
    for x, text, _ in sorted(marks):
        if text and x >= end:
            labels.append({**place, "x": x, "text": text})
            end = x + (high - low) * _LABEL_SHARE * (1 + len(text)) / 2
    return {"shapes": lines, "annotations": labels}


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


def _numbers(values: Numbers, *, digits: int = 6) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def phase_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the phases of a step as stacked bars, of the trainer and of the orchestrator of every run."""
    found = (_phases(run, process, runs, number) for number, run in enumerate(runs) for process in _WHOLES)
    return [chart for chart in found if chart is not None]


def _phases(run: RunData, process: str, runs: Sequence[RunData], number: int) -> Chart | None:
    metrics, whole = run.metrics, _WHOLES[process]
    if whole not in metrics.values:
        return None
    parts = [name for name in metrics.values if name.startswith("time/") and name not in _WHOLES.values()]
    names = [name for name in parts if (name in _OF_ORCHESTRATOR) == (process == "orchestrator")]
    columns = np.array([np.nan_to_num(metrics.values[name]) for name in [*names, whole]])
    size = max(1, math.ceil(len(metrics.steps) / _MAX_BARS))
    begins = np.arange(0, len(metrics.steps), size)
    means = np.add.reduceat(columns, begins, axis=1) / np.diff(np.append(begins, len(metrics.steps)))
    rest = np.maximum(0.0, means[-1] - means[:-1].sum(axis=0))
    stacked = [*zip((name.removeprefix("time/") for name in names), means[:-1], strict=True), ("other", rest)]
    traces = [
        {"type": "bar", "name": _escaped(name), "x": metrics.steps[begins].astype(int).tolist(),
         "y": _numbers(mean, digits=4), "marker": {"color": colour_of_phase(name, place), "line": {"width": 0}}}
        for place, (name, mean) in enumerate(stacked)
        if mean.any()
    ]  # fmt: skip
    if not traces:
        return None
    notes = [f"each bar is the mean of {size} steps"] if size > 1 else []
    figure = _figure(traces, "seconds", [run])
    figure["layout"] |= {"barmode": "stack", "bargap": 0, "showlegend": True}
    usual = float(np.quantile(means[-1], 0.9))
    if usual > 0 and (highest := means[-1].max()) > 4 * usual:  # a few long steps would press the others flat
        figure["layout"]["yaxis"]["range"] = [0, 1.5 * usual]
        notes.append(f"some bars are higher than the chart, the highest {highest:.3g} s")
    title = _titled(f"Phases of a {'step: trainer' if process == 'trainer' else 'batch: orchestrator'}", run, runs)
    return Chart(f"phases_{process}_{number}", title, figure, "; ".join(notes))


def _titled(title: str, run: RunData, runs: Sequence[RunData]) -> str:
    return title if len(runs) == 1 else f"{title}, {run.name}"


def evaluation_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return a chart for each environment: its estimates over the evaluated versions, with their intervals."""
    traces: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        found: dict[tuple[str, str], list[tuple[int, Estimate]]] = {}
        for version, environment, _, name, estimate in run.estimates:
            if version is not None:
                found.setdefault((environment, name), []).append((version, estimate))
        positions = Counter[str]()
        for (environment, name), values in found.items():
            x, y = np.array([float(v) for v, _ in values]), np.array([e.value for _, e in values])
            low = np.array([e.value if e.low is None else e.low for _, e in values])
            high = np.array([e.value if e.high is None else e.high for _, e in values])
            title = name if len(runs) == 1 else f"{run.name}: {name}"
            trace = _line(title, x, y, runs, number, positions[environment])
            positions[environment] += 1
            ends = {"array": _numbers(high - y), "arrayminus": _numbers(y - low), "color": trace["line"]["color"]}
            trace["error_y"] = {"type": "data", "symmetric": False, "thickness": 1, "width": 3, **ends}
            traces.setdefault(environment, []).append(trace)
    return [
        Chart(f"evaluation_{number}", f"Held-out tasks: {environment}", _figure(found, "mean over tasks", runs),
              "bars are confidence intervals")
        for number, (environment, found) in enumerate(traces.items())
    ]  # fmt: skip


class _Block(NamedTuple):
    """A stretch of a lane of a timeline, in unix seconds."""

    lane: str
    name: str
    begin: float
    end: float
    text: str


def timeline_of(run: RunData, runs: Sequence[RunData], number: int) -> Chart | None:
    """Return what every process of a run did when; None if nothing was recorded."""
    blocks = sorted([*_spans(run.spans), *_starts(run)], key=lambda block: block.begin)
    if not blocks:
        return None
    notes = ["what is not coloured is idle"]
    if run.later_attempts:
        notes.append("dotted lines with a number: where that attempt of the run began")
    if len(blocks) > MAX_BLOCKS:
        notes.append(f"the last {MAX_BLOCKS:,} of {len(blocks):,} spans")
        blocks = blocks[-MAX_BLOCKS:]
    begin, end = blocks[0].begin, max(block.end for block in blocks)
    lanes = sorted({block.lane for block in blocks}, key=lambda lane: (_rank(lane), lane))
    kinds = dict.fromkeys(block.name for block in blocks)
    traces = [
        _bars(kind, [block for block in blocks if block.name == kind], colour_of_phase(kind, number))
        for number, kind in enumerate(kinds)
    ]
    marks = [(one.begin * _MS, str(one.number), _GREY) for one in run.later_attempts if one.begin >= begin]
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {"type": "date", "title": {"text": "time (UTC)"}},
        "yaxis": {"categoryorder": "array", "categoryarray": [_escaped(lane) for lane in reversed(lanes)]},
        "showlegend": True,
        **_marked(marks, begin * _MS, end * _MS),
    }
    figure = {"data": traces, "layout": layout}
    return Chart(f"timeline_{number}", _titled("Timeline", run, runs), figure, "; ".join(notes), is_timeline=True)


def _rank(lane: str) -> int:
    return next((number for number, name in enumerate(_LANES) if lane.startswith(name)), len(_LANES))


def _spans(spans: Sequence[Span]) -> Iterator[_Block]:
    for one in spans:
        if one.name == "start":
            continue
        words = [one.name]
        words += [f"step {one.step}"] if one.step is not None else []
        words += [f"version {one.version}"] if one.version is not None else []
        words += [f"{one.count} of them"] if one.count > 1 else []
        lane = f"{one.process}: {one.lane}" if one.lane else one.process
        yield _Block(lane, one.name, one.begin, one.end, ", ".join([*words, f"{one.end - one.begin:.3g} s"]))


def _starts(run: RunData) -> Iterator[_Block]:
    for (attempt, process), (begin, end) in run.starts.items():
        if end > begin:
            yield _Block(process, "start-up", begin, end, f"start-up, attempt {attempt}, {end - begin:.3g} s")


def _bars(name: str, blocks: Sequence[_Block], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _escaped(name),
        "y": [_escaped(block.lane) for block in blocks],
        "base": [round(block.begin * _MS) for block in blocks],
        "x": [round((block.end - block.begin) * _MS, 1) for block in blocks],
        "hovertext": [_escaped(block.text) for block in blocks],
        "hoverinfo": "text",
        "marker": {"color": colour, "line": {"width": 0}},
    }
