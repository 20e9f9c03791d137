"""The command `monitor`: what runs elsewhere are doing, from their files alone. It writes nothing and takes no lock."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.text import Text

from holdfast.commands.live.charts import glyphs_for
from holdfast.commands.live.observe import ObservedRun
from holdfast.commands.live.region import Region, cut, is_terminal, terminal_size
from holdfast.commands.live.view import run_view, table_view
from holdfast.commands.subcommands import Parser, add_json
from holdfast.shared.errors import ConfigError, DataError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.child import make_output_lossy

_PLAIN_WIDTH, _MOST_LINES = 100, 1000
_KEYS_S = 0.1
_LOCAL_MODES = 3  # in what termios.tcgetattr returns


def main(argv: list[str]) -> int:
    """Show one run or several until Ctrl-C or `q`; return the exit code, 0.

    Raises:
        ConfigError, DataError: a mistake on the command line, or a directory that holds no run.
    """
    arguments = _parse(argv)
    if not arguments.wait:
        for path in arguments.runs:
            _require_run(path)
    runs = [ObservedRun(RunDir(path), name) for path, name in zip(arguments.runs, _names(arguments.runs), strict=True)]
    if arguments.once or arguments.json or not is_terminal(sys.stdout):
        return _print(runs, arguments)
    make_output_lossy()
    return _watch(runs, arguments)


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="monitor",
        allow_abbrev=False,
        description="Show what runs are doing, from their files alone: nothing is written, no lock is taken. Ctrl-C or "
        "q ends it, which does nothing to the runs. See docs/console.md.",
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
    width = terminal_size(sys.stdout)[0] if sys.stdout.isatty() else _PLAIN_WIDTH
    _print_lines(_lines(runs, width=width, height=_MOST_LINES))
    return 0


def _sleep(seconds: float, ended: Sequence[int]) -> None:
    """Wait, until a signal at most: Python goes on sleeping after one that is only noted."""
    until = time.monotonic() + seconds
    while not ended and (left := until - time.monotonic()) > 0:
        time.sleep(min(_KEYS_S, left))


def _watch(runs: Sequence[ObservedRun], arguments: Namespace) -> int:
    """Draw what is known again and again, until a key or a signal."""
    stream = sys.stdout
    glyphs = glyphs_for(getattr(stream, "encoding", None))
    last: list[Text] = []
    with _ended_by_signals() as ended, _keys() as pressed, Region(stream, glyphs) as region:
        looked = -arguments.interval
        while not ended:
            if time.monotonic() - looked >= arguments.interval:
                _look(runs)
                looked = time.monotonic()
            width, height = region.size
            last = _lines(runs, width=width - 1, height=max(1, height - 2))
            region.draw(last)
            if pressed(_KEYS_S) in ("q", "Q"):
                break
    _print_lines(last)  # what was known last stays
    return 0


def _look(runs: Sequence[ObservedRun]) -> None:
    for run in runs:
        run.look()


def _lines(runs: Sequence[ObservedRun], *, width: int, height: int) -> list[Text]:
    glyphs = glyphs_for(getattr(sys.stdout, "encoding", None))
    shown, now = [run.shown() for run in runs], time.time()
    if len(shown) == 1:
        return run_view(shown[0], width=width, height=height, glyphs=glyphs, now=now)
    return table_view(shown, width=width, height=height, glyphs=glyphs, now=now)


def _print_lines(lines: Sequence[Text]) -> None:
    glyphs = glyphs_for(getattr(sys.stdout, "encoding", None))
    for line in lines:
        # Texts of files may hold what a terminal would act on.
        print(cut(line, len(line.plain) * 2, glyphs).plain.rstrip())


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


@contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits for a key for some seconds, and returns it; keys are not shown meanwhile."""
    # Whoever closes stdin (`<&-`) leaves none at all.
    if sys.stdin is None or not sys.stdin.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        yield lambda seconds: time.sleep(seconds) or ""
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor) if _is_in_front(descriptor) else None

    def pressed(seconds: float) -> str:
        nonlocal before
        if not _is_in_front(descriptor):  # who sets a terminal, or reads it, from the background is stopped
            time.sleep(seconds)
            return ""
        modes = termios.tcgetattr(descriptor)
        if modes[_LOCAL_MODES] & (termios.ICANON | termios.ECHO):  # at the begin, and after Ctrl-Z and `fg`
            before = before or modes
            tty.setcbreak(descriptor)
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        yield pressed
    finally:
        if before is not None and _is_in_front(descriptor):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_in_front(descriptor: int) -> bool:
    """Whether the keys of a terminal are for this process."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # it is not the terminal that controls this process
        return False
