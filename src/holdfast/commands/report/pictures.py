"""The charts of a page as pictures: `report --png DIR`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.commands.report.charts import Chart, Lanes
from holdfast.commands.report.page import Page
from holdfast.shared.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def draw_pictures(page: Page, directory: Path) -> int:
    """Write `directory/<chart>.png` for every chart that is not folded away; return how many.

    Raises:
        DataError: one cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [chart for section in page.sections if not section.is_folded for chart in section.charts]
    for chart in charts:
        is_wide = isinstance(chart, Lanes)
        figure = Figure(figsize=(11 if is_wide else 6.4, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        panel = figure.subplots()
        _draw_lanes(panel, chart) if isinstance(chart, Lanes) else _draw_curves(panel, chart)
        panel.set_title(chart.title, fontsize=10, parse_math=False)
        handles, labels = panel.get_legend_handles_labels()
        if len(labels) > 1:
            names = [label.replace("$", r"\$") for label in labels]
            figure.legend(handles, names, fontsize=7, loc="outside lower center", ncols=3)
        path = directory / f"{_NO_NAME.sub('_', chart.key)}.png"
        try:
            directory.mkdir(exist_ok=True)
            figure.savefig(path, dpi=120)
        except OSError as error:
            raise DataError(f"--png: {path} cannot be written: {error.strerror or error}") from None
    return len(charts)


def _draw_curves(panel: Axes, chart: Chart) -> None:
    bottom = np.zeros_like(chart.series[0].x)
    for one in chart.series:
        if chart.is_stack:
            width = float(np.median(np.diff(one.x))) if len(one.x) > 1 else 1.0
            panel.bar(one.x, one.y, width=width, bottom=bottom, color=one.colour, label=one.name)
            bottom = bottom + one.y
            continue
        marker = "o" if one.shows_points else ""
        style = {
            "color": one.colour,
            "linestyle": _DASHES[one.dash],
            "marker": marker,
            "markersize": 3,
            "linewidth": one.width,
        }
        if one.low is not None and one.high is not None:
            spread = np.array([one.y - one.low, one.high - one.y])
            panel.errorbar(one.x, one.y, yerr=spread, label=one.name, capsize=2, **style)
        else:
            panel.plot(one.x, one.y, label=one.name, **style)
    for mark in chart.marks:
        panel.axvline(mark.x, color=mark.colour, linestyle=":", linewidth=1)
    panel.set_ylim(top=chart.top, bottom=0 if chart.is_stack else None)
    panel.set_xlabel("step")
    panel.set_ylabel(chart.unit, parse_math=False)
    panel.grid(alpha=0.3)


def _draw_lanes(panel: Axes, chart: Lanes) -> None:
    begin = min(block.begin for block in chart.blocks)
    for kind, colour in chart.colours.items():
        for number, lane in enumerate(reversed(chart.names)):
            mine = [block for block in chart.blocks if block.name == kind and block.lane == lane]
            label = kind if number == 0 else ""
            bars = [(block.begin - begin, block.end - block.begin) for block in mine]
            panel.broken_barh(bars, (number - 0.38, 0.76), facecolors=colour, label=label)
    for mark in chart.marks:
        panel.axvline(mark.x - begin, color=mark.colour, linestyle=":", linewidth=1)
    panel.set_yticks(range(len(chart.names)), [name.replace("$", r"\$") for name in reversed(chart.names)])
    panel.set_xlabel(f"seconds since {datetime.fromtimestamp(begin, UTC):%Y-%m-%d %H:%M:%S} UTC")
    panel.grid(axis="x", alpha=0.3)
