"""The command `report RUN [RUN...]`: one page about one or several runs, built from what their files say."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.arguments import Parser
from holdfast.errors import ConfigError, DataError, printable
from holdfast.run import atomic
from holdfast.run.settings import flat_settings
from holdfast.view.report.columns import Lanes
from holdfast.view.report.curves import (
    LEARNING,
    SPEED,
    charts_of,
    evaluation_charts,
    lanes_of,
    others,
    phase_charts,
    shown_number,
)
from holdfast.view.report.page import Page, ReportSection, SampleRollout, Table, render, sample_rollouts
from holdfast.view.report.run_data import RunData, read_run, shown_time

_MAX_TOLD = 200
_MAX_TEXT = 100_000
_SHOWN_METRICS = ("reward/mean", "loss", "val/loss", "rewards/accuracies")


def build_page(runs: Sequence[RunData], *, made: float) -> Page:
    """Return the page of some runs.

    Args:
        made: Unix time of now.
    """
    samples: list[tuple[str, list[SampleRollout]]] = []
    notes = [_named(run, note, runs) for run in runs for note in run.notes]
    for run in runs:
        found, unread = sample_rollouts(run)
        notes += [_named(run, note, runs) for note in unread]
        if found:
            samples.append((run.name, found))
    return Page(
        title=" and ".join(run.name for run in runs),
        made=made,
        facts=_facts(runs),
        sections=_sections(runs),
        tables=[table for table in _tables(runs) if table.rows],
        samples=samples,
        settings={
            f"{run.name}: {name}": text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}\n... cut"
            for run in runs
            for name, text in _own_settings(run).items()
        },
        notes=notes,
    )


def _named(run: RunData, note: str, runs: Sequence[RunData]) -> str:
    return note if len(runs) == 1 else f"{run.name}: {note}"


def _own_settings(run: RunData) -> dict[str, str]:
    """Return the files that say everything: those of the parts of `rl` are within its own."""
    whole = {name: text for name, text in run.settings_text.items() if name == "rl.toml"}
    return whole or run.settings_text


def _facts(runs: Sequence[RunData]) -> Table:
    rows = []
    for run in runs:
        ends = [one.end for one in run.spans] + [event.time for event in run.events]
        begins = [one.begin for one in run.attempts if one.begin is not None]
        hours = f"{(max(ends) - min(begins)) / 3600:.2f} h" if ends and begins else "-"
        steps = str(run.last_step) if run.max_steps is None else f"{run.last_step} of {run.max_steps}"
        last = [
            f"{name} {shown_number(float(run.metrics.curve(name)[1][-1]))}"
            for name in _SHOWN_METRICS
            if name in run.metrics.values and len(run.metrics.curve(name)[1])
        ]
        rows.append(
            (run.name, run.program, run.state, steps, _attempts(run), hours, ", ".join(last) or "-",
             printable(run.run_dir.path))
        )  # fmt: skip
    head = ("run", "program", "state", "steps", "attempts", "first to last sign", "last values", "directory")
    return Table("Runs", head, rows)


def _sections(runs: Sequence[RunData]) -> list[ReportSection]:
    alone = len(runs) == 1
    lanes = [lanes_of(run, key=f"timeline_{number}", alone=alone) for number, run in enumerate(runs)]
    marked = any(run.later_attempts for run in runs)
    note = "Dotted lines: a later attempt of the run went on behind this step." if marked else ""
    timeline: list[Lanes] = [one for one in lanes if one is not None]
    sections = [
        ReportSection("learning", "Learning", charts_of(LEARNING, runs), note=note),
        ReportSection("evaluations", "Evaluations", evaluation_charts(runs)),
        ReportSection("timeline", "Timeline", timeline, is_wide=True),
        ReportSection("phases", "Phases", phase_charts(runs), is_wide=alone),
        ReportSection("speed", "Speed", charts_of(SPEED, runs)),
        _others(runs),
    ]
    return [section for section in sections if section.charts]


def _others(runs: Sequence[RunData]) -> ReportSection:
    charts, num_left_out = others(runs, (*LEARNING, *SPEED))
    note = f"{num_left_out} more metrics are not shown: metrics.jsonl has them" if num_left_out else ""
    return ReportSection("others", "Other metrics", charts, is_folded=True, note=note)


def _tables(runs: Sequence[RunData]) -> list[Table]:
    return [_settings_diff(runs), _told(runs), _checkpoints(runs), _begun(runs), _estimates(runs)]


def _settings_diff(runs: Sequence[RunData]) -> Table:
    """Return the settings that are not the same in all runs."""
    flats = [_flat(run) for run in runs]
    rows = []
    for key in sorted({key for flat in flats for key in flat}):
        values = [repr(flat[key]) if key in flat else "unset" for flat in flats]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return Table("Settings that differ", ("setting", *(run.name for run in runs)), rows)


def _flat(run: RunData) -> dict[str, Any]:
    whole = {name: table for name, table in run.settings.items() if name == "rl"} or run.settings
    return {
        key: value
        for table in whole.values()
        for key, value in flat_settings(table).items()
        if not key.endswith(("output_dir", "resume_step", "clean"))
    }


def _told(runs: Sequence[RunData]) -> Table:
    rows = [
        (run.name, shown_time(event.time), "-" if event.step is None else str(event.step), event.phase)
        for run in runs
        for event in run.told[-_MAX_TOLD:]
    ]
    number = sum(len(run.told) for run in runs)
    note = f"the last {_MAX_TOLD} of a run; there are {number}" if len(rows) < number else ""
    return Table("Alerts", ("run", "time (UTC)", "step", "alert"), rows, note)


def _checkpoints(runs: Sequence[RunData]) -> Table:
    rows = [
        (run.name, str(one.step), one.status, f"{one.size_bytes / 2**20:.1f} MiB", shown_time(one.saved))
        for run in runs
        for one in run.checkpoints
    ]
    left_out = sum(run.num_checkpoints - len(run.checkpoints) for run in runs)
    note = f"{left_out} older ones are not shown; `ckpt ls` shows all" if left_out else ""
    return Table("Checkpoints", ("run", "step", "status", "size", "saved (UTC)"), rows, note)


def _attempts(run: RunData) -> str:
    """Return how many there were, of which the first is no restart."""
    return str(run.attempts[-1].number) if run.attempts else "-"


def _begun(runs: Sequence[RunData]) -> Table:
    rows = [
        (run.name, str(one.number), shown_time(one.begin), str(one.resume_step) if one.resume_step else "from scratch")
        for run in runs
        for one in run.attempts
    ]
    head = ("run", "attempt", "time (UTC)", "went on behind step")
    return Table("Attempts", head, rows if len(rows) > 1 else [])


def _estimates(runs: Sequence[RunData]) -> Table:
    rows = [
        (
            run.name,
            "-" if version is None else str(version),
            environment,
            str(one.num_tasks),
            name,
            shown_number(estimate.value),
            f"{shown_number(estimate.low)} to {shown_number(estimate.high)}",
        )
        for run in runs
        for version, summary in run.summaries.items()
        for environment, one in summary.environments.items()
        for name, estimate in one.estimates.items()
    ]
    head = ("run", "version", "environment", "tasks", "estimate", "value", "interval")
    return Table("Evaluated", head, rows[-_MAX_TOLD:], f"the last {_MAX_TOLD}" if len(rows) > _MAX_TOLD else "")


_EPILOG = "Nothing of a run is changed, and one that is going on is not disturbed. See docs/console.md."


def main(argv: list[str]) -> int:
    """Write the report that `argv` asks for; return the exit code.

    Raises:
        ConfigError: a path is no run, or what draws is not installed.
        DataError: something cannot be written.
    """
    arguments = parse(argv)
    to = arguments.to or arguments.runs[0] / "report.html"
    if to.suffix not in (".html", ".htm"):
        raise ConfigError(f"--to {to}: the name of a page ends with .html")
    runs = read_runs(arguments.runs)
    if not to.absolute().parent.is_dir():
        raise ConfigError(f"--to {to}: there is no directory {to.parent}")
    page = build_page(runs, made=time.time())
    size = write_page(page, to)
    print(f"{printable(to)}: {size / 1e6:.1f} MB, of {', '.join(run.name for run in runs)}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Return what a command line asks for."""
    parser = Parser(
        prog="report",
        allow_abbrev=False,
        description="Curves, timeline, evaluations, checkpoints and rollouts of runs, as one HTML file.",
        epilog=_EPILOG,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output directories; several are overlaid")
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="the file (report.html in the first RUN)")
    return parser.parse_args(argv)


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Return what is there of some runs, each once, with names that differ.

    Raises:
        ConfigError: a path is no run.
    """
    runs = [read_run(path) for path in dict.fromkeys(path.absolute() for path in paths)]
    # Of its directory, with that of its parent, or the whole path: the first that tells them apart.
    for parts in (1, 2, None):
        names = [
            str(Path(*(run.run_dir.path.parts if parts is None else run.run_dir.path.parts[-parts:]))) for run in runs
        ]
        if len(set(names)) == len(names):
            break
    # Names of directories are bytes: not all of them are text that a page can hold.
    return [replace(run, name=printable(name)) for run, name in zip(runs, names, strict=True)]


def library() -> str:
    """Return the source of what draws."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def write_page(page: Page, to: Path) -> int:
    """Write a page to its place by one rename; return its size in bytes.

    Raises:
        DataError: it cannot be written.
    """
    content = render(page, library()).encode()
    try:
        atomic.write_file(to, content)
    except OSError as error:
        raise DataError(
            f"{to} cannot be written: {error.strerror or error}. Choose another place with --to FILE.html."
        ) from None
    return len(content)
