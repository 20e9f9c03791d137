"""The command `monitor`: shows runs that other commands started, from their files, without writes and locks."""

import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.arguments import Parser, add_json
from holdfast.errors import ConfigError, printable
from holdfast.process.child import NotedSignals, make_output_lossy
from holdfast.run.choose_run import all_runs, no_run, refuse_flags
from holdfast.run.run_dir import RunDir
from holdfast.view.console import phase_text, step_line
from holdfast.view.follow import ObservedRun, short_names
from holdfast.view.state import duration
from holdfast.view.tables import Grid, age, print_parts

_VALUES = {"reward/mean": "reward", "val/loss": "val loss", "loss": "loss"}
_MAX_ALARMS, _MAX_PRINTED = 3, 100


def run_lines(run: ObservedRun, *, now: float) -> list[str]:
    """Return the lines about one run at the unix time `now`, without control characters."""
    state = run.state
    facts = [run.name, f"{run.status} {run.since}".rstrip()]
    facts += [f"attempt {state.attempt}"] if state.attempt else []
    lines = [" | ".join([*facts, f"{state.restarts} restart{'' if state.restarts == 1 else 's'}"])]
    if run.is_evaluation:
        phase = state.phases.get("evaluation")
        tasks = phase.details.get("tasks") if phase is not None else None
        lines.append(f"evaluation {phase.name if phase else 'starting'}" + (f", tasks {tasks}" if tasks else ""))
    else:
        left_s = state.left_s if run.is_running else None
        line = step_line({"step": state.step, **state.metrics}, state.max_steps, left_s=left_s)
        lines.append(line if state.step or not run.is_running else f"{line}  starting")
        lines += [str(state.bottleneck)] if run.is_running and state.bottleneck is not None else []
        lines.append(_checkpoint_line(run, now))
    if run.is_running:
        lines += [phase_text(phase, now=now) for phase in state.starting()]
    lines += _alarm_lines(run)
    error = (state.ended or {}).get("error")
    if run.status == "failed" and isinstance(error, str) and error.strip():
        lines.append(f"error: {error.strip().splitlines()[0]}")  # without its log
    return [printable(line) for line in lines]


def _checkpoint_line(run: ObservedRun, now: float) -> str:
    found, words = run.checkpoints, list[str]()
    if found.good is not None and found.saved_unix_s is not None:
        words.append(f"step {found.good} committed {age(now - found.saved_unix_s)} ago")
    else:
        words.append("none committed")
    if found.saving is not None:
        words.append(f"saving step {found.saving}" if run.is_running else f"save of step {found.saving} broke off")
    if found.damaged:
        good = "none" if found.good is None else f"step {found.good}"
        words.append(f"step {found.damaged[-1]} is damaged, last good: {good}")
    if found.unreadable:
        words.append(f"step {found.unreadable[-1]} cannot be read just now")
    behind = run.state.step - (found.good or 0)
    if behind > 0 and found.saving is None:
        words.append(f"{behind} step{'' if behind == 1 else 's'} since")
    return f"checkpoint  {', '.join(words)}"


def _alarm_lines(run: ObservedRun) -> list[str]:
    """Return the newest alarm, and the last others, alerts before warnings."""
    if not run.state.alarms:
        return []
    *others, newest = sorted(run.state.alarms, key=lambda alarm: alarm.unix_s)
    others.sort(key=lambda alarm: alarm.kind == "alert")
    kept = [*sorted(others[-(_MAX_ALARMS - 1) :], key=lambda alarm: alarm.unix_s), newest]
    lines = [
        f"{alarm.kind.upper()}{'' if alarm.step is None else f' step {alarm.step}'}: {alarm.text}" for alarm in kept
    ]
    more = len(run.state.alarms) - len(kept)
    return [*lines, f"and {more} more"] if more else lines


def table_of_runs(runs: Sequence[ObservedRun], *, now: float) -> Grid:
    columns = ("run", "state", ">step", ">left", "value", "bottleneck", "checkpoint", ">restarts", ">alerts")
    return Grid(columns, [[printable(cell) for cell in _row(run, now)] for run in runs])


def _row(run: ObservedRun, now: float) -> list[str]:
    state, found = run.state, run.checkpoints
    values = ((name, state.metrics.get(metric)) for metric, name in _VALUES.items())
    bottleneck = state.bottleneck if run.is_running else None
    saved = "" if found.saved_unix_s is None else f"{found.good}, {age(now - found.saved_unix_s)} ago"
    return [
        run.name,
        run.status,
        f"{state.step}/{state.max_steps}" if state.max_steps else str(state.step),
        duration(state.left_s) if run.is_running and state.left_s else "",
        next((f"{name} {value:.4f}" for name, value in values if isinstance(value, int | float)), ""),
        bottleneck.part if bottleneck is not None else "",
        saved,
        str(state.restarts or ""),
        str(sum(alarm.kind == "alert" for alarm in state.alarms) or ""),
    ]


def document_of(run: ObservedRun) -> dict[str, Any]:
    state, is_running, limit = run.state, run.status == "running", run.state.bottleneck
    checkpoints = asdict(run.checkpoints)
    return {
        "run": str(run.run_dir.path),
        "status": run.status,
        "holder": run.holder or None,
        "attempt": state.attempt or None,
        "restarts": state.restarts,
        "begun_unix_s": state.begun_unix_s,
        "changed_unix_s": run.changed_unix_s,
        "ended": state.ended,
        "step": state.step,
        "max_steps": state.max_steps,
        "left_s": state.left_s if is_running else None,
        "metrics": state.metrics,
        "bottleneck": None if limit is None else asdict(limit),
        "phases": {phase.process: phase.name for phase in state.phases.values()},
        "checkpoint": checkpoints if is_running else {**checkpoints, "saving": None},
        "alerts": [asdict(alarm) for alarm in state.alarms[-_MAX_PRINTED:]],
    }


def main(argv: list[str]) -> int:
    """Show one run or several until Ctrl-C; return the exit code, 0. Raise ConfigError for a mistake on the command
    line, or a directory that holds no run."""
    arguments = _parse(argv)
    for path in arguments.runs:
        if not arguments.wait and not RunDir(path).holds_run():
            raise no_run(path)
    names = short_names(arguments.runs)
    runs = [ObservedRun(RunDir(path), name) for path, name in zip(arguments.runs, names, strict=True)]
    is_watching = sys.stdout.isatty() and not (arguments.once or arguments.json)
    with NotedSignals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as stop:
        if is_watching:
            _watch(runs, arguments.interval, stop)
            return 0
        _look(runs)
        while arguments.wait and any(run.status in ("waiting", "unreadable") for run in runs) and not stop.came:
            stop.wait(arguments.interval)
            _look(runs)
    if arguments.json:
        documents = [document_of(run) for run in runs]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, default=str))
    else:
        print_parts(_parts(runs))
    return 0


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="monitor",
        description="Show what runs are doing, from their files alone: nothing is written, no lock is taken. Ctrl-C "
        "ends it, which does nothing to the runs. See docs/console.md.",
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="run directories; several are rows of a table (unset: all below outputs)",
    )
    parser.add_argument("--once", action="store_true", help="print what is known now, and end, as without a terminal")
    add_json(parser)
    parser.add_argument("--wait", action="store_true", help="wait for directories that hold no run yet")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    refuse_flags(parser, argv)
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.interval <= 3600:
        raise ConfigError(f"--interval {arguments.interval:g} is not allowed: give 0.05 to 3600 seconds")
    arguments.runs = arguments.runs or all_runs("monitor", argv, takes_evaluations=True)
    return arguments


def _look(runs: Sequence[ObservedRun]) -> None:
    for run in runs:
        run.look()


def _parts(runs: Sequence[ObservedRun]) -> list[Grid | str]:
    now = time.time()
    return [*run_lines(runs[0], now=now)] if len(runs) == 1 else [table_of_runs(runs, now=now)]


def _watch(runs: Sequence[ObservedRun], interval_s: float, stop: NotedSignals) -> None:
    """Show what is known again and again, until a signal; the last state stays on the screen."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    make_output_lossy()
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while not stop.came:
            _look(runs)
            parts = [part.table() if isinstance(part, Grid) else Text(part) for part in _parts(runs)]
            live.update(Group(*parts), refresh=True)
            stop.wait(interval_s)
