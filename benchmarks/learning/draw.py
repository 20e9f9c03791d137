"""Curves as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.learning.results import Run

_COLUMNS = 4


def draw(panels: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw held-out exact match by step as PNG: a panel for each title, a colour for each variant, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for place in places.flat[len(panels) :]:
        place.set_axis_off()
    for place, (title, runs) in zip(places.flat, panels.items(), strict=False):
        variants = list(dict.fromkeys(run.variant for run in runs))
        labelled: set[str] = set()
        for run in runs:
            label = None if run.variant in labelled else run.variant
            labelled.add(run.variant)
            place.plot(list(run.curve), list(run.curve.values()), linewidth=1, marker="o", markersize=2, label=label,
                       color=f"C{variants.index(run.variant)}")  # fmt: skip
        place.set_title(title, fontsize=9)
        place.set_ylim(0, 1)
        place.grid(alpha=0.3)
        if len(variants) > 1:
            place.legend(fontsize=6)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out exact match, sampled", fontsize=9)
    figure.savefig(path, dpi=100)


def panels_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return what belongs side by side: tasks with GRPO, TRL beside it, controls, pairs, old weights, others."""
    from benchmarks.learning.runs import CONTROLS, DPO, STALE, TRL

    first = "sort_letters"
    panels: dict[str, list[Run]] = {}
    for run in runs:
        if run.variant == "grpo":
            panels.setdefault(run.task, []).append(run)
    on_first = [run for run in runs if run.task == first]
    beside = [run for run in on_first if run.variant in ("grpo", TRL)]
    if any(run.variant == TRL for run in beside):
        panels["beside TRL"] = beside
    grouped = {"controls": CONTROLS, "dpo": (DPO,), "bfloat16, old weights": STALE}
    apart = {"grpo", TRL}.union(*grouped.values())
    grouped["other algorithms"] = tuple({run.variant for run in on_first} - apart)
    panels |= {title: [run for run in on_first if run.variant in variants] for title, variants in grouped.items()}
    return {title: runs for title, runs in panels.items() if runs}
