"""The command `monitor`: what runs elsewhere are doing, from their files alone. It writes nothing and takes no lock."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from holdfast.commands.live.observe import ObservedRun
from holdfast.commands.live.view import run_lines, table_of_runs
from holdfast.commands.subcommands import Parser, add_json
from holdfast.commands.tables import Grid, print_parts
from holdfast.shared.errors import ConfigError, DataError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.child import make_output_lossy

_SIGNALS_S = 0.1


def main(argv: list[str]) -> int:
    """Show one run or several until Ctrl-C; return the exit code, 0.

    Raises:
        ConfigError, DataError: a mistake on the command line, or a directory that holds no run.
    """
    arguments = _parse(argv)
    if not arguments.wait:
        for path in arguments.runs:
            _require_run(path)
    runs = [ObservedRun(RunDir(path), name) for path, name in zip(arguments.runs, _names(arguments.runs), strict=True)]
    if arguments.once or arguments.json or not sys.stdout.isatty():
        return _print(runs, arguments)
    make_output_lossy()
    return _watch(runs, arguments)


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="monitor",
        allow_abbrev=False,
        description="Show what runs are doing, from their files alone: nothing is written, no lock is taken. Ctrl-C "
        "ends it, which does nothing to the runs. See docs/console.md.",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run directories; several are rows of a table"
    )
    parser.add_argument("--once", action="store_true", help="print what is known now, and end, as without a terminal")
    add_json(parser)
    parser.add_argument("--wait", action="store_true", help="wait for directories that hold no run yet")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    arguments = parser.parse_args(argv)
    if not arguments.runs:
        raise ConfigError("name at least one run directory, as in `monitor outputs/reverse_text_rl`")
    if not 0.05 <= arguments.interval <= 3600:
        raise ConfigError(f"--interval {arguments.interval:g} is not allowed: give 0.05 to 3600 seconds")
    return arguments


def _require_run(path: Path) -> None:
    """Refuse what holds no run.

    Raises:
        DataError: naming what is there, and what to do.
    """
    if RunDir(path).holds_run():
        return
    if not path.exists():
        what = f"there is no directory {path} (from {Path.cwd()})"
    elif not path.is_dir():
        what = f"{path} is a file, and not a run directory"
    else:
        inside = sorted(one.name for one in path.iterdir() if one.is_dir() and RunDir(one).holds_run())
        below = f" It has runs below it: {', '.join(inside[:5])}." if inside else ""
        what = f"{path} holds no run: it has no run.json.{below}"
    raise DataError(f"{what.rstrip('.')}. Give the --output-dir of a run; --wait waits for one that is about to start.")


def _names(paths: Sequence[Path]) -> list[str]:
    """Return short names that differ."""
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return [str(path.absolute().relative_to(shared)) for path in paths]


def _print(runs: Sequence[ObservedRun], arguments: Namespace) -> int:
    """Print what is known now; with `--wait`, as soon as every run is there."""
    with _ended_by_signals() as ended:
        _look(runs)
        while arguments.wait and any(run.status in ("waiting", "unreadable") for run in runs) and not ended:
            _sleep(arguments.interval, ended)
            _look(runs)
    if arguments.json:
        documents = [run.document() for run in runs]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, default=str))
        return 0
    print_parts(_parts(runs))
    return 0


def _sleep(seconds: float, ended: Sequence[int]) -> None:
    """Wait, until a signal at most: Python goes on sleeping after one that is only noted."""
    until = time.monotonic() + seconds
    while not ended and (left := until - time.monotonic()) > 0:
        time.sleep(min(_SIGNALS_S, left))


def _watch(runs: Sequence[ObservedRun], arguments: Namespace) -> int:
    """Show what is known again and again, until a signal; what was known last stays."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with _ended_by_signals() as ended, Live(console=console, auto_refresh=False) as live:
        while not ended:
            _look(runs)
            parts = [part.fitted(console) if isinstance(part, Grid) else Text(part) for part in _parts(runs)]
            live.update(Group(*parts), refresh=True)
            _sleep(arguments.interval, ended)
    return 0


def _look(runs: Sequence[ObservedRun]) -> None:
    for run in runs:
        run.look()


def _parts(runs: Sequence[ObservedRun]) -> list[Grid | str]:
    shown, now = [run.shown() for run in runs], time.time()
    return [*run_lines(shown[0], now=now)] if len(shown) == 1 else [table_of_runs(shown, now=now)]


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Give a list that a signal which asks for the end is put into."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
