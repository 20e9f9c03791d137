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
    """Return what belongs side by side: tasks with GRPO; TRL and rounds beside it; controls, pairs and the rest."""
    from benchmarks.learning.runs import CONTROLS, DPO, ROUNDS, STALE, TRL

    first = "sort_letters"
    panels: dict[str, list[Run]] = {}
    for run in runs:
        if run.variant == "grpo":
            panels.setdefault(run.task, []).append(run)
    on_first = [run for run in runs if run.task == first]
    for title, variants in {"beside TRL": (TRL,), "rounds": ROUNDS}.items():
        if any(run.variant in variants for run in on_first):
            panels[title] = [run for run in on_first if run.variant in ("grpo", *variants)]
    grouped = {"controls": CONTROLS, "dpo": (DPO,), "bfloat16, old weights": STALE}
    apart = {"grpo", TRL, *ROUNDS}.union(*grouped.values())
    grouped["other algorithms"] = tuple({run.variant for run in on_first} - apart)
    panels |= {title: [run for run in on_first if run.variant in variants] for title, variants in grouped.items()}
    return {title: runs for title, runs in panels.items() if runs}


FIRST_SCREEN = "SmolLM2 (135M) learns JSON: held-out exact answers"
"""The title of README's picture."""
_INK = {
    "grpo": ("#0969da", "#58a6ff"),
    "trl": ("#9a6700", "#d29922"),
    "control": ("#6e7781", "#8b949e"),
    "text": ("#1f2328", "#e6edf3"),
}
"""Colours on a light and on a dark page."""


def draw_first_screen(runs: Sequence[Run], title: str, path: Path) -> None:
    """Draw runs of one task as SVG for the first screen of README: readable on a phone, on light and dark pages.

    Each seed is a line. The name of a variant stands where the mean of its runs ends.
    """
    width, height, left, right, top, bottom = 640, 400, 62, 200, 56, 52
    last = max(max(run.curve) for run in runs)

    def place(step: int, share: float) -> tuple[float, float]:
        return left + (width - left - right) * step / last, height - bottom - (height - top - bottom) * share

    styles = [" ".join(f".{name} {{ stroke: {light}; fill: {light} }}" for name, (light, _) in _INK.items())]
    styles += [" ".join(f".{name} {{ stroke: {dark}; fill: {dark} }}" for name, (_, dark) in _INK.items())]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">',
        f"<style>{styles[0]} @media (prefers-color-scheme: dark) {{ {styles[1]} }}",
        "text { font: 19px system-ui, sans-serif; stroke: none !important }",
        "polyline { fill: none !important; stroke-width: 3 }</style>",
        f'<text class="text" x="{left - 46}" y="30" font-weight="600">{title}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        x, y = place(0, share)
        lines.append(f'<line class="control" x1="{x}" x2="{width - right}" y1="{y}" y2="{y}" opacity="0.4"/>')
        lines.append(f'<text class="text" x="{x - 8}" y="{y + 6}" text-anchor="end">{share:g}</text>')
    for step in (0, last // 2, last):
        x, y = place(step, 0)
        lines.append(f'<text class="text" x="{x}" y="{y + 26}" text-anchor="middle">{step}</text>')
    lines.append(f'<text class="text" x="{width - right + 22}" y="{height - bottom + 26}">steps</text>')
    ends: list[tuple[float, str, str]] = []
    for variant in dict.fromkeys(run.variant for run in runs):
        of_variant = [run for run in runs if run.variant == variant]
        colour = variant if variant in _INK else "control"
        for run in of_variant:
            points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in run.curve.items())
            lines.append(f'<polyline class="{colour}" points="{points}"/>')
        end = sum(list(run.curve.values())[-1] for run in of_variant) / len(of_variant)
        name = {"grpo": "holdfast", "trl": "TRL", "permuted_rewards": "shuffled rewards"}.get(variant, variant)
        seeds = f", {len(of_variant)} seeds" if len(of_variant) > 1 else ""
        ends.append((place(last, end)[1], colour, name + seeds))
    below = 0.0
    for y, colour, name in sorted(ends):
        below = max(y + 6, below + 22)  # names of runs that end alike stand below each other
        lines.append(f'<text class="{colour}" x="{width - right + 8}" y="{below:.1f}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]))


def first_screen_of(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of README's picture: GRPO, TRL and the control on one task of SmolLM2, in this order."""
    shown = ("grpo", "trl", "permuted_rewards")
    of_task = [run for run in runs if run.task == "to_json" and run.variant in shown]
    return sorted(of_task, key=lambda run: shown.index(run.variant))
