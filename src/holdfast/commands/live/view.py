"""What `monitor` prints: lines about one run, and a table of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.commands.live.checkpoint_state import Checkpoints
from holdfast.commands.live.plain import phase_text, step_line
from holdfast.commands.live.state import RunState
from holdfast.commands.live.time_left import duration
from holdfast.commands.tables import Grid, age
from holdfast.shared.printable import printable

_VALUES = {"reward/mean": "reward", "val/loss": "val loss", "loss": "loss"}
_MOST_ALARMS = 3


@dataclass(frozen=True)
class Shown:
    """What a view is made of.

    Attributes:
        name: of the run: its directory.
        status: `running`, `finished`, `stopped`, `failed`, or what else there is to say.
        since: what follows the status, such as for how long.
        is_evaluation: of `evaluate`, which has tasks in place of steps and checkpoints.
    """

    name: str
    status: str
    state: RunState
    checkpoints: Checkpoints
    since: str = ""
    is_evaluation: bool = False

    @property
    def is_running(self) -> bool:
        """Whether processes are at work."""
        return self.status not in ("finished", "stopped", "failed")


def run_lines(shown: Shown, *, now: float) -> list[str]:
    """Return the lines about one run, without what a terminal would act on.

    Args:
        now: in unix seconds.
    """
    state = shown.state
    facts = [shown.name, f"{shown.status} {shown.since}".rstrip()]
    facts += [f"attempt {state.attempt}"] if state.attempt else []
    lines = [" | ".join([*facts, f"{state.restarts} restart{'' if state.restarts == 1 else 's'}"])]
    if shown.is_evaluation:
        lines.append(_evaluation(state))
    else:
        lines += [_progress(shown), _checkpoint(shown, now)]
        lines[2:2] = [str(state.bottleneck)] if shown.is_running and state.bottleneck is not None else []
    if shown.is_running:
        lines += [phase_text(phase, now=now) for phase in state.starting()]
    lines += _alarms(state)
    error = (state.ended or {}).get("error")
    if shown.status == "failed" and isinstance(error, str) and error.strip():
        lines.append(f"error: {error.strip().splitlines()[0]}")  # the message without its log
    return [printable(line) for line in lines]


def _evaluation(state: RunState) -> str:
    said = [phase for phase in state.phases.values() if phase.process == "evaluation"]
    if not said:
        return "evaluation starting"
    tasks = said[-1].details.get("tasks")
    return f"evaluation {said[-1].name}" + (f", tasks {tasks}" if tasks else "")


def _progress(shown: Shown) -> str:
    state = shown.state
    left_s = state.left_s if shown.is_running else None
    line = step_line({"step": state.step, **state.metrics}, state.max_steps, left_s=left_s)
    return line if state.step or not shown.is_running else f"{line}  starting"


def _checkpoint(shown: Shown, now: float) -> str:
    found = shown.checkpoints
    said = []
    if found.good is not None and found.saved_unix_s is not None:
        said.append(f"step {found.good} committed {age(now - found.saved_unix_s)} ago")
    else:
        said.append("none committed")
    if found.saving is not None:
        said.append(f"saving step {found.saving}" if shown.is_running else f"save of step {found.saving} broke off")
    if found.damaged:
        good = "none" if found.good is None else f"step {found.good}"
        said.append(f"step {found.damaged[-1]} is damaged, last good: {good}")
    if found.unreadable:
        said.append(f"step {found.unreadable[-1]} cannot be read just now")
    behind = shown.state.step - (found.good or 0)
    if behind > 0 and found.saving is None:
        said.append(f"{behind} step{'' if behind == 1 else 's'} since")
    return f"checkpoint  {', '.join(said)}"


def _alarms(state: RunState) -> list[str]:
    """Return the newest alarm, and the last others, alerts before warnings."""
    if not state.alarms:
        return []
    *others, newest = sorted(state.alarms, key=lambda alarm: alarm.unix_s)
    others.sort(key=lambda alarm: (alarm.kind == "alert", alarm.unix_s))
    kept = [*sorted(others[-(_MOST_ALARMS - 1) :], key=lambda alarm: alarm.unix_s), newest]
    more = state.num_alarms.total() - len(kept)
    lines = [
        f"{alarm.kind.upper()}{'' if alarm.step is None else f' step {alarm.step}'}: {alarm.text}" for alarm in kept
    ]
    return [*lines, f"and {more} more"] if more else lines


def table_of_runs(runs: Sequence[Shown], *, now: float) -> Grid:
    """Return a table with a row for each run."""
    columns = ("run", "state", ">step", ">left", "value", "bottleneck", "checkpoint", ">restarts", ">alerts")
    expendable = ("restarts", "bottleneck", "alerts", "checkpoint", "left", "value")
    return Grid(columns, [[printable(cell) for cell in _row(shown, now)] for shown in runs], expendable)


def _row(shown: Shown, now: float) -> list[str]:
    state, found = shown.state, shown.checkpoints
    values = ((name, state.metrics.get(metric)) for metric, name in _VALUES.items())
    value = next((f"{name} {latest:.4f}" for name, latest in values if isinstance(latest, int | float)), "")
    bottleneck = state.bottleneck if shown.is_running else None
    saved = ""
    if found.good is not None and found.saved_unix_s is not None:
        saved = f"{found.good}, {age(now - found.saved_unix_s)} ago"
    alerts = state.num_alarms["alert"]
    return [
        shown.name,
        shown.status,
        f"{state.step}/{state.max_steps}" if state.max_steps else str(state.step),
        duration(state.left_s) if shown.is_running and state.left_s else "",
        value,
        bottleneck.who if bottleneck is not None else "",
        saved,
        str(state.restarts) if state.restarts else "",
        str(alerts) if alerts else "",
    ]
