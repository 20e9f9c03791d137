"""The lines of a live view: of one run, and of several in a table. They are as many as there is room for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from holdfast.commands.live.charts import Glyphs, bar, sparkline
from holdfast.commands.live.checkpoint_state import Checkpoints
from holdfast.commands.live.plain import USUAL_TIMES
from holdfast.commands.live.state import CURVES, Phase, RunState
from holdfast.commands.live.time_left import duration
from holdfast.commands.tables import age

_CURVE_NAMES = {"reward/mean": "reward", "val/loss": "val loss", "loss": "loss"}
_LABEL_WIDTH = 11
_MOST_CURVE = 60
_MOST_BAR = 60
_MOST_ALARMS = 3
_MOST_ERROR = 3
_STATE_STYLES = {"running": "green", "finished": "green", "stopped": "yellow", "silent": "yellow", "failed": "bold red"}


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


def run_view(shown: Shown, *, width: int, height: int, glyphs: Glyphs, now: float) -> list[Text]:
    """Return the lines about one run, at most `height`, each at most `width` wide.

    Args:
        now: in unix seconds.
    """
    state = shown.state
    progress = _evaluation_line(state) if shown.is_evaluation else _progress(shown, width, glyphs)
    ranked: list[tuple[int, Text]] = [(2, _head(shown, width, glyphs)), (0, progress)]
    ranked += [(5, line) for line in _curves(state, width, glyphs)]
    if state.metrics:
        ranked.append((6, _fitting(_figures(state), width, glyphs)))
    if (bottleneck := state.bottleneck) is not None and shown.is_running:
        style = "" if bottleneck.who == "none" else "yellow"
        ranked.append((4, Text(str(bottleneck), style)))
    if not shown.is_evaluation:
        ranked.append((3, _checkpoint_line(shown, width, glyphs, now)))
    if shown.is_running:
        ranked += [(7, _phase_line(phase, now)) for phase in state.starting()]
    ranked += [(1, line) for line in _alarm_lines(state, width, glyphs)]
    if shown.status == "failed":
        ranked += [(1, line) for line in _error_lines(state, width, glyphs)]
    while len(ranked) > max(1, height):
        # The least important goes, of several the last.
        worst = max(range(len(ranked)), key=lambda number: (ranked[number][0], number))
        del ranked[worst]
    for _, line in ranked:
        _shorten(line, width, glyphs)
    return [line for _, line in ranked]


def _head(shown: Shown, width: int, glyphs: Glyphs) -> Text:
    """Return the rule with the name of the run, its state, attempt and restarts."""
    state = shown.state
    facts = [f"{shown.status} {shown.since}".rstrip()]
    if state.attempt:
        facts.append(f"attempt {state.attempt}")
    facts.append(f"{state.restarts} restart{'' if state.restarts == 1 else 's'}")
    said = glyphs.gap.join(facts)
    room = width - len(said) - 8
    name = shown.name
    if len(name) > room:  # its end tells it from others
        name = glyphs.cut + name[len(name) - room + 1 :] if room > 8 else ""
    line = Text(glyphs.rule * 2 + " ", "dim")
    if name:
        line.append(name, "bold")
        line.append(glyphs.gap)
    line.append(said, _STATE_STYLES.get(shown.status, "cyan"))
    line.append(" " + glyphs.rule * max(0, width - line.cell_len - 1), "dim")
    return line


def _evaluation_line(state: RunState) -> Text:
    said = [phase for phase in state.phases.values() if phase.process == "evaluation"]
    if not said:
        return Text("evaluation starting")
    tasks = said[-1].details.get("tasks")
    return Text(f"evaluation {said[-1].name}" + (f", tasks {tasks}" if tasks else ""))


def _progress(shown: Shown, width: int, glyphs: Glyphs) -> Text:
    state = shown.state
    last = state.max_steps
    line = Text(f"step {state.step}{f'/{last}' if last else ''}")
    if not last:
        return line
    share = state.step / last
    left = ""
    if shown.is_running and state.step < last and state.left_s:
        left = f"  left {duration(state.left_s)}"
    elif shown.is_running and not state.step:
        left = "  starting"
    said = f"{100 * min(1.0, share):4.0f} %{left}"
    room = min(_MOST_BAR, width - line.cell_len - len(said) - 2)
    if room >= 5:
        done, rest = bar(share, room, glyphs)
        line.append("  ")
        line.append(done, "green")
        line.append(rest, "dim")
    return line.append(said)


def _curves(state: RunState, width: int, glyphs: Glyphs) -> list[Text]:
    names = [name for name in CURVES if state.curves.get(name)]
    if "reward/mean" in names:  # the loss of a policy says little
        names = [name for name in names if name != "loss"]
    lines = []
    for name in names:
        values = state.curves[name]
        latest = state.metrics.get(name)
        value = values[-1] if latest is None else latest
        line = Text(f"{_CURVE_NAMES[name]:<{_LABEL_WIDTH}}")
        line.append(f"{value:8.4f}", "bold")
        course = sparkline(values, min(_MOST_CURVE, width - line.cell_len - 30), glyphs)
        if course:
            line.append("  ")
            line.append(course, "cyan")
        line.append(f"  {min(values):.4g} to {max(values):.4g}", "dim")
        lines.append(line)
    return lines


def _figures(state: RunState) -> list[str]:
    """Return the figures of the last step, the most telling first."""
    said = []
    for name, template in (
        ("tokens_per_s", "{:,.0f} tok/s"),
        ("time/step", "{:.2f} s/step"),
        ("staleness/mean", "staleness {:.3g}"),
        ("engine/idle_share", "engines {:.0%} idle"),
        ("time/wait_for_batch", "wait for batch {:.2f} s"),
        ("time/wait_for_weights", "for weights {:.2f} s"),
        ("entropy", "entropy {:.3g}"),
        ("grad_norm", "grad {:.3g}"),
        ("memory_gib", "{:.2f} GiB"),
    ):
        value = state.metrics.get(name)
        if isinstance(value, int | float):
            text = template.format(value)
            if name == "staleness/mean" and isinstance(most := state.metrics.get("staleness/max"), int | float):
                text += f" (max {most:.3g})"
            said.append(text)
    return said


def _checkpoint_line(shown: Shown, width: int, glyphs: Glyphs, now: float) -> Text:
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
    line = Text(f"{'checkpoint':<{_LABEL_WIDTH}}")
    return line.append(_fitting(said, width - _LABEL_WIDTH, glyphs, style="red" if found.damaged else ""))


def _phase_line(phase: Phase, now: float) -> Text:
    usual = f", {USUAL_TIMES[phase.name]}" if phase.name in USUAL_TIMES else ""
    line = Text(f"{phase.process:<12} {phase.name}")
    if phase.name not in ("ready", "finished"):
        line.append(f" ({duration(now - phase.since_unix_s)}{usual})", "dim")
    return line


def _alarm_lines(state: RunState, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the newest alarm, and the last others, alerts before warnings."""
    if not state.alarms:
        return []
    *others, newest = sorted(state.alarms, key=lambda alarm: alarm.unix_s)
    others.sort(key=lambda alarm: (alarm.kind == "alert", alarm.unix_s))
    kept = [*sorted(others[-(_MOST_ALARMS - 1) :], key=lambda alarm: alarm.unix_s), newest]
    lines = []
    for alarm in kept:
        at = "" if alarm.step is None else f" step {alarm.step}"
        style = "bold red" if alarm.kind == "alert" else "yellow"
        lines.append(Text(f"{alarm.kind.upper()}{at}: {alarm.text}", style))
    more = state.num_alarms.total() - len(kept)
    if more:
        _shorten(lines[-1], width - 12, glyphs)
        lines[-1].append(f" (+{more} more)", "dim")
    return lines


def _error_lines(state: RunState, width: int, glyphs: Glyphs) -> list[Text]:
    """Return what the run failed with: the first line of its message, which is the message without its log."""
    error = (state.ended or {}).get("error")
    if not isinstance(error, str) or not error.strip():
        return []
    first = f"error: {error.strip().splitlines()[0]}"
    lines = textwrap.wrap(first, max(width, 20), max_lines=_MOST_ERROR, placeholder=f" {glyphs.cut}")
    return [Text(line, "bold red") for line in lines]


def _fitting(parts: Sequence[str], width: int, glyphs: Glyphs, *, style: str = "") -> Text:
    """Return as many of `parts`, from the first on, as fit into one line."""
    kept = list(parts)
    while len(kept) > 1 and len(glyphs.gap.join(kept)) > width:
        kept.pop()
    return Text(glyphs.gap.join(kept), style)


def _shorten(line: Text, width: int, glyphs: Glyphs) -> None:
    """Cut a line that is too long."""
    if line.cell_len > width:
        line.truncate(max(0, width - 1))
        line.append(glyphs.cut if width > 0 else "")


# Columns of the table of several runs: heading, and their rank when there is no room for all.
_TABLE = (("run", 0), ("state", 1), ("step", 2), ("left", 4), ("value", 3), ("bottleneck", 7), ("checkpoint", 5),
          ("restarts", 8), ("alerts", 6))  # fmt: skip


def table_view(runs: Sequence[Shown], *, width: int, height: int, glyphs: Glyphs, now: float) -> list[Text]:
    """Return a table with a row for each run, in as many columns and rows as fit."""
    rows = [_row(shown, now) for shown in runs]
    columns = [(name, rank, [row[number] for row in rows]) for number, (name, rank) in enumerate(_TABLE)]
    columns = [column for column in columns if any(column[2])]
    names = max(len(cell) for cell in columns[0][2])

    def total(some: Sequence[tuple[str, int, list[str]]]) -> int:
        return sum(max(len(name), *(len(cell) for cell in cells)) + 2 for name, _, cells in some)

    while len(columns) > 2 and total(columns) - max(0, names - 12) > width:
        columns.remove(max(columns, key=lambda column: column[1]))
    over = total(columns) - width
    if over > 0:  # the end of a path tells it from others
        room = max(4, names - over)
        cells = [cell if len(cell) <= room else glyphs.cut + cell[len(cell) - room + 1 :] for cell in columns[0][2]]
        columns[0] = (columns[0][0], columns[0][1], cells)
    widths = [max(len(name), *(len(cell) for cell in cells)) for name, _, cells in columns]
    lines = [Text("  ".join(f"{column[0]:<{size}}" for column, size in zip(columns, widths, strict=True)), "bold")]
    for number, shown in enumerate(runs):
        line = Text()
        for column, size in zip(columns, widths, strict=True):
            style = _STATE_STYLES.get(shown.status, "") if column[0] == "state" else ""
            style = "bold red" if column[0] == "alerts" else style
            line.append(f"{column[2][number]:<{size}}", style).append("  ")
        lines.append(line)
    if len(lines) > height:
        more = len(lines) - height + 1
        lines = [*lines[: max(1, height - 1)], Text(f"{more} more runs: there is no room for them", "dim")]
    for line in lines:
        line.rstrip()
        _shorten(line, width, glyphs)
    return lines


def _row(shown: Shown, now: float) -> list[str]:
    state, found = shown.state, shown.checkpoints
    value = ""
    for name in CURVES:
        if isinstance(latest := state.metrics.get(name), int | float):
            value = f"{_CURVE_NAMES[name]} {latest:.4f}"
            break
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
