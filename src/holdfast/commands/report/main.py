"""`report RUN [RUN...]`: what one or several runs did, on one page."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.commands.report.build import build_page
from holdfast.commands.report.page import Page, render
from holdfast.commands.report.run_data import RunData, read_run
from holdfast.commands.subcommands import Parser
from holdfast.orchestrator.environments.extras import import_extra
from holdfast.shared.errors import ConfigError, DataError
from holdfast.shared.files import durable
from holdfast.shared.printable import printable

_EPILOG = "Nothing of a run is changed, and one that is going on is not disturbed. See docs/report.md."


def main(argv: list[str]) -> int:
    """Write the report that `argv` asks for; return the exit code.

    Raises:
        ConfigError: a path is no run, or what draws is not installed.
        DataError: something cannot be written.
    """
    arguments = parse(argv)
    import_extra("plotly", extra="report", needed_by="the page of a report")
    if arguments.png is not None:
        import_extra("matplotlib", extra="report", needed_by="report --png")
    to = arguments.to or arguments.runs[0] / "report.html"
    if to.suffix not in (".html", ".htm"):
        raise ConfigError(f"--to {to}: the name of a page ends with .html")
    runs = read_runs(arguments.runs)
    for flag, place in (("--to", to), ("--png", arguments.png)):
        if place is not None and not place.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {place}: there is no directory {place.parent}")
    page = build_page(runs, made=time.time())
    size = write_page(page, to)
    print(f"{printable(to)}: {size / 1e6:.1f} MB, of {', '.join(run.name for run in runs)}")
    if arguments.png is not None:
        from holdfast.commands.report.pictures import draw_pictures

        number = draw_pictures(page, arguments.png)
        print(f"{arguments.png}: {number} pictures")
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
    parser.add_argument("--png", type=Path, metavar="DIR", help="also write every chart there, as DIR/<chart>.png")
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
        durable.write_file(to, content)
    except OSError as error:
        raise DataError(
            f"{to} cannot be written: {error.strerror or error}. Choose another place with --to FILE.html."
        ) from None
    return len(content)
