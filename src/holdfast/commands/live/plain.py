"""Lines of text about what goes on, the same in a file, in a pipe and on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.commands.live.state import Alarm, Phase
from holdfast.commands.live.time_left import duration
from holdfast.shared.printable import printable

USUAL_TIMES = {
    "importing torch": "usually 3-10 s",
    "loading vllm": "usually 15-60 s, minutes on a cold disk",
    "loading model": "seconds for small models",
}
"""How long what a process begins with usually takes."""
ENDS = ("ready", "finished", "stopped")
"""Phases that nothing goes on in."""

_MOST_OF_ALARM = 2000
_COLUMNS = {
    "reward/mean": "reward {:6.3f}",
    "loss": "loss {:8.4f}",
    "val/loss": "val {:7.4f}",
    "grad_norm": "grad {:7.3f}",
    "mismatch_kl": "mismatch {:8.1e}",
    "lr": "lr {:.1e}",
    "tokens_per_s": "{:7,.0f} tok/s",
    "time/step": "{:6.2f} s",
    "time/wait_for_batch": "wait {:5.2f} s",
    "memory_gib": "{:5.2f} GiB",
}


def step_line(metrics: Mapping[str, Any], max_steps: int | None, *, left_s: float | None = None) -> str:
    """Return the one line that a step gets; columns that a program lacks are left out."""
    step = int(metrics["step"])
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}" if max_steps else f"step {step}"]
    parts += [
        template.format(value)
        for name, template in _COLUMNS.items()
        if isinstance(value := metrics.get(name), int | float)
    ]
    return "  ".join([*parts, *([f"left {duration(left_s)}"] if left_s else [])])


def phase_text(phase: Phase, *, now: float) -> str:
    """Return what a process does, for how long, and how long it usually takes.

    Args:
        now: in unix seconds.
    """
    usual = f", {USUAL_TIMES[phase.name]}" if phase.name in USUAL_TIMES else ""
    lasts = "" if phase.name in ENDS else f" ({duration(now - phase.since_unix_s)}{usual})"
    return f"{phase.process:<12} {phase.name}{lasts}"


def event_line(told: Phase | Alarm, *, seconds: float) -> str:
    """Return the line that an event gets.

    Args:
        seconds: since the attempt was started here.
    """
    if isinstance(told, Alarm):
        at = "" if told.step is None else f"  step {told.step}"
        return (
            f"{seconds:6.1f}s  {told.process:<12}  {told.kind.upper()}: {printable(told.text, most=_MOST_OF_ALARM)}{at}"
        )
    shown = " ".join(f"{key} {value}" for key, value in told.details.items())
    usual = f" ({USUAL_TIMES[told.name]})" if told.name in USUAL_TIMES else ""
    return f"{seconds:6.1f}s  {told.process:<12}  {told.name}{usual}  {shown}".rstrip()
