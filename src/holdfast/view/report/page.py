"""Renders a report: one self-contained HTML file drawn by plotly.js, and its sample rollouts.

The HTML file holds plotly.js and loads nothing. The sample rollouts come from batches that are still in the journal.
"""

from __future__ import annotations

import html
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.errors import HoldfastError
from holdfast.protocol.rollouts import Batch, Rollout
from holdfast.run.atomic import is_gone
from holdfast.run.journal import read_batch
from holdfast.view.report.columns import Chart, Lanes, Mark, Numbers, Series
from holdfast.view.report.run_data import RunData, shown_time
from holdfast.view.rollout_text import TextOf, problems_of, text_of

MAX_BATCHES = 4
_GROUPS_OF_A_BATCH = 2
_MAX_TOKENS = 300
_MAX_CHARACTERS = 200
_CONTEXT_TOKENS = 6


@dataclass(frozen=True)
class Token:
    """One token; `logprob` None where it was not sampled."""

    text: str
    logprob: float | None


@dataclass(frozen=True)
class SampleRollout:
    """One rollout to show.

    Attributes:
        advantage: its reward less the mean of its group.
        tokens: the first of them.
        num_left_out: how many more there are.
    """

    step: int
    environment: str
    task_id: int
    sample_index: int
    reward: float
    advantage: float
    truncated: bool
    tokens: list[Token]
    num_left_out: int

    @property
    def direction(self) -> str:
        """`better`, `worse` or `even`, than the mean of its group."""
        return "even" if abs(self.advantage) < 1e-9 else "better" if self.advantage > 0 else "worse"


def sample_rollouts(run: RunData) -> tuple[list[SampleRollout], list[str]]:
    """Return the best and the worst rollout of the groups that differ most, of a few batches, and what was not read."""
    there = run.run_dir.published_batches()
    if not there:
        return [], []
    last = len(there) - 1
    wanted = sorted({there[round(last * part / max(1, MAX_BATCHES - 1))] for part in range(MAX_BATCHES)})
    text = text_of(run.run_dir)
    notes = [f"texts cannot be shown: {text.reason}"] if text.reason else []
    found: list[SampleRollout] = []
    for step in reversed(wanted):
        try:
            batch = read_batch(run.run_dir, step)
        except (HoldfastError, OSError) as error:  # the trainer of a run that goes on has removed it, or it is damaged
            if not is_gone(run.run_dir.batch(step)):
                notes.append(f"batch {step} is left out: {error}")
            continue
        found += _of_batch(batch, text)
    return found, notes


def _of_batch(batch: Batch, text: TextOf) -> list[SampleRollout]:
    groups = sorted(problems_of(batch), key=lambda group: _spread([one.reward for one in group]), reverse=True)
    shown = []
    for group in groups[:_GROUPS_OF_A_BATCH]:
        mean = sum(one.reward for one in group) / len(group)
        ordered = sorted(group, key=lambda one: one.reward)
        chosen = [ordered[-1], ordered[0]] if len(ordered) > 1 else ordered
        shown += [_sample(batch.step, one, one.reward - mean, text) for one in chosen]
    return shown


def _spread(rewards: Sequence[float]) -> float:
    return max(rewards) - min(rewards)


def _sample(step: int, rollout: Rollout, advantage: float, text: TextOf) -> SampleRollout:
    token_ids = list(rollout.token_ids)
    pieces = _pieces(token_ids[:_MAX_TOKENS], text)
    sampled, logprobs = list(rollout.loss_mask), list(rollout.logprobs)
    return SampleRollout(
        step,
        rollout.environment,
        rollout.task_id,
        rollout.sample_index,
        rollout.reward,
        advantage,
        rollout.truncated,
        [Token(piece, logprobs[at] if sampled[at] else None) for at, piece in enumerate(pieces)],
        max(0, len(token_ids) - _MAX_TOKENS),
    )


def _pieces(token_ids: Sequence[int], text: TextOf) -> list[str]:
    """Return what each token adds to the text: many say nothing alone."""
    pieces = []
    for at, token_id in enumerate(token_ids):
        before = token_ids[max(0, at - _CONTEXT_TOKENS) : at]
        head, whole = text.decode(before), text.decode([*before, token_id])
        if head is None or whole is None:
            pieces.append(f"{token_id} ")
            continue
        piece = whole[len(head) :] if whole.startswith(head) else text.decode([token_id]) or ""
        pieces.append(piece if len(piece) <= _MAX_CHARACTERS else f"{piece[:_MAX_CHARACTERS]}…")
    return pieces


_HERE = Path(__file__).parent
_MS = 1000.0
_LABEL_SHARE = 0.025


@dataclass(frozen=True)
class ReportSection:
    """A part of the page: charts under a heading."""

    key: str
    title: str
    charts: Sequence[Chart | Lanes]
    is_wide: bool = False
    is_folded: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table under a heading; `note` says what is left out."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def key(self) -> str:
        """What it is called in the page: the same whichever tables are there."""
        return f"table-{self.title.lower().replace(' ', '-')}"


@dataclass(frozen=True)
class Page:
    """Everything that a page shows.

    Attributes:
        settings: texts by the name of their run and file.
    """

    title: str
    made: float
    facts: Table
    sections: Sequence[ReportSection]
    tables: Sequence[Table]
    samples: Sequence[tuple[str, Sequence[SampleRollout]]] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Live:
    """What a page knows that is served while its run goes on.

    Attributes:
        tag: no other page has it.
        run_id: another run may be served in the same place later.
        command: that makes the file.
    """

    tag: str
    run_id: str
    command: str


def render(page: Page, plotly_js: str, *, live: Live | None = None) -> str:
    """Return the HTML of a page.

    All text of the run is escaped. A policy in the page forbids all network; one that is live may ask who serves it.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = {chart.key: _figure(chart) for section in page.sections for chart in section.charts}
    return environment.get_template("page.html").render(
        page=page,
        made=shown_time(page.made),
        figures=Markup(_script_json(figures)),
        # Never of a run: what the package and the library hold.
        plotly_js=Markup(plotly_js),
        live=live,
        live_js=Markup((_HERE / "live.js").read_text()),
        page_js=Markup((_HERE / "page.js").read_text()),
        page_css=Markup((_HERE / "page.css").read_text()),
        nonce=secrets.token_urlsafe(16),
    )


def _script_json(value: object) -> str:
    """Return JSON that can stand in a script element: nothing in it ends that, or begins a comment."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _figure(chart: Chart | Lanes) -> dict[str, Any]:
    """Return what plotly.js draws, without the theme, which the page sets."""
    return _lanes(chart) if isinstance(chart, Lanes) else _curves(chart)


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _numbers(values: Numbers, *, digits: int = 6) -> list[float | None]:
    """Return numbers as short as the eye needs them."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def _steps(values: Numbers) -> list[int]:
    return values.astype(int).tolist()


def _curves(chart: Chart) -> dict[str, Any]:
    traces = [_bar(one) if chart.is_stack else _line(one) for one in chart.series]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": _text(chart.unit)}},
        "showlegend": len(chart.series) > 1,
        "shapes": [_vertical(mark, mark.x) for mark in chart.marks],
        "annotations": _labels(chart.marks, low=_end(chart, min), high=_end(chart, max)),
    }
    whole = np.concatenate([one.y for one in chart.series])
    if chart.top is not None:
        layout["yaxis"]["range"] = [0, chart.top]
    elif whole.min() == whole.max():  # else the axis would be from one below to one above
        layout["yaxis"]["range"] = sorted((0.0, 2 * float(whole[0]))) if whole[0] else [-1, 1]
    if chart.is_stack:
        layout |= {"barmode": "stack", "bargap": 0}
    return {"data": traces, "layout": layout}


def _line(one: Series) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if one.shows_points else "lines",
        "name": _text(one.name),
        "x": _steps(one.x),
        "y": _numbers(one.y),
        "line": {"color": one.colour, "dash": one.dash, "width": one.width},
        "marker": {"size": 5, "color": one.colour},
    }
    if one.low is not None and one.high is not None:
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": _numbers(one.high - one.y),
            "arrayminus": _numbers(one.y - one.low),
            "thickness": 1,
            "width": 3,
            "color": one.colour,
        }
    return trace


def _bar(one: Series) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": _text(one.name),
        "x": _steps(one.x),
        "y": _numbers(one.y, digits=4),
        "marker": {"color": one.colour, "line": {"width": 0}},
    }


def _lanes(chart: Lanes) -> dict[str, Any]:
    traces = []
    for kind, colour in chart.colours.items():
        blocks = [block for block in chart.blocks if block.name == kind]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _text(kind),
                "y": [_text(block.lane) for block in blocks],
                "base": [round(block.begin * _MS) for block in blocks],
                "x": [round((block.end - block.begin) * _MS, 1) for block in blocks],
                "hovertext": [_text(block.text) for block in blocks],
                "hoverinfo": "text",
                "marker": {"color": colour, "line": {"width": 0}},
            }
        )
    return {
        "data": traces,
        "layout": {
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": {"type": "date", "title": {"text": "time (UTC)"}},
            "yaxis": {"categoryorder": "array", "categoryarray": [_text(one) for one in reversed(chart.names)]},
            "showlegend": True,
            "shapes": [_vertical(mark, mark.x * _MS) for mark in chart.marks],
            "annotations": _labels(
                chart.marks,
                low=min(block.begin for block in chart.blocks),
                high=max(block.end for block in chart.blocks),
                scale=_MS,
            ),
        },
    }


def _vertical(mark: Mark, x: float) -> dict[str, Any]:
    line = {"color": mark.colour, "width": 1.2, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line}


def _end(chart: Chart, end: Callable[[Iterable[float]], float]) -> float:
    return end(float(end(one.x.tolist())) for one in chart.series)


def _labels(marks: Sequence[Mark], *, low: float, high: float, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return the texts over marks, but for those that would lie on the one before."""
    place = {"y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 10}}
    labels = []
    end = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.x):
        room = (high - low) * _LABEL_SHARE * (1 + len(mark.text)) / 2
        if mark.text and mark.x >= end:
            labels.append({**place, "x": mark.x * scale, "text": _text(mark.text)})
            end = mark.x + room
    return labels
