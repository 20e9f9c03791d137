"""Lines of text about what goes on, the same in a file, in a pipe and above the live view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.commands.live.state import Alarm, Phase
from holdfast.commands.live.time_left import duration

USUAL_TIMES = {
    "importing torch": "usually 3-10 s",
    "loading vllm": "usually 15-60 s, minutes on a cold disk",
    "loading model": "seconds for small models",
}
"""How long what a process begins with usually takes."""

# Metric, how it is shown, and its rank when there is no room for all: the highest go first.
_COLUMNS = (
    ("reward/mean", "reward {:6.3f}", 1),
    ("loss", "loss {:8.4f}", 0),
    ("val/loss", "val {:7.4f}", 2),
    ("grad_norm", "grad {:7.3f}", 5),
    ("mismatch_kl", "mismatch {:8.1e}", 7),
    ("lr", "lr {:.1e}", 8),
    ("tokens_per_s", "{:7,.0f} tok/s", 4),
    ("time/step", "{:6.2f} s", 3),
    ("time/wait_for_batch", "wait {:5.2f} s", 6),
    ("memory_gib", "{:5.2f} GiB", 9),
)


def step_line(
    metrics: Mapping[str, Any], max_steps: int, *, left_s: float | None = None, width: int | None = None
) -> str:
    """Return the one line that a step gets; columns that a program lacks are left out.

    Args:
        width: of the terminal: columns that do not fit are left out, too.
    """
    digits = len(str(max_steps))
    head = f"step {int(metrics['step']):>{digits}}/{max_steps}"
    columns = [
        (rank, template.format(value))
        for name, template, rank in _COLUMNS
        if isinstance(value := metrics.get(name), int | float)
    ]
    if left_s:
        columns.append((2, f"left {duration(left_s)}"))
    while True:
        line = "  ".join([head, *(text for _, text in columns)])
        if width is None or len(line) <= width or not columns:
            return line
        columns.remove(max(columns))


def event_line(told: Phase | Alarm, *, seconds: float) -> str:
    """Return the line that an event gets.

    Args:
        seconds: since the attempt was started here.
    """
    if isinstance(told, Alarm):
        at = "" if told.step is None else f"  step {told.step}"
        return f"{seconds:6.1f}s  {told.process:<12}  {told.kind.upper()}: {told.text}{at}"
    shown = " ".join(f"{key} {value}" for key, value in told.details.items())
    usual = f" ({USUAL_TIMES[told.name]})" if told.name in USUAL_TIMES else ""
    return f"{seconds:6.1f}s  {told.process:<12}  {told.name}{usual}  {shown}".rstrip()
