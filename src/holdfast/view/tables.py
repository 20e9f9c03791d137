"""The results of subcommands, for people (tables) and for scripts (one JSON document)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# `rich` takes 0.1 s to import, and commands that print no table come here, too: each function imports what it needs.

_PIPED_WIDTH = 10_000
_STYLES = {"committed": "green", "OK": "green", "damaged": "bold red", "torn": "yellow"}


@dataclass(frozen=True)
class Grid:
    """A table. Columns whose heading begins with `>` hold numbers, and are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def table(self) -> Table:
        """Return the table of rich; a narrow terminal folds long cells."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in self.columns:
            table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        return table


def print_parts(parts: Sequence[Grid | str]) -> None:
    """Write tables and lines of text to stdout, as wide as the terminal; without a terminal nothing is wrapped."""
    from rich.console import Console
    from rich.text import Text

    is_piped = not sys.stdout.isatty()
    console = Console(highlight=False, width=_PIPED_WIDTH if is_piped else None)
    with console.capture() as capture:
        for part in parts:
            is_table = isinstance(part, Grid)
            console.print(part.table() if is_table else Text(part), soft_wrap=not is_table)
    text = capture.get()
    if is_piped:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    sys.stdout.write(text)


@dataclass(frozen=True)
class Report:
    """The result of one subcommand.

    Attributes:
        document: what `--json` prints.
        parts: what people see: tables, and lines of text.
        problems: a line each; any makes the exit code 1.
    """

    document: dict[str, Any]
    parts: Sequence[Grid | str]
    problems: Sequence[str] = field(default=())

    def print(self, *, as_json: bool) -> None:
        """Write the document, or the parts and the problems, to stdout."""
        if as_json:
            import msgspec

            try:
                text = msgspec.json.format(msgspec.json.encode(self.document), indent=1).decode()
            except UnicodeEncodeError:  # a path that is not UTF-8
                text = json.dumps(msgspec.to_builtins(self.document), indent=1)
            sys.stdout.write(f"{text}\n")
            return
        print_parts((*self.parts, *self.problems))

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr that something takes time; yield a function that shows the progress."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True, highlight=False).status(escape(what)) as status:
        yield lambda where: status.update(escape(f"{what}: {where}"))


def size(num_bytes: float) -> str:
    """Return a size in decimal units: `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB" if num_bytes >= 100 else f"{num_bytes:.3g} TB"


def age(seconds: float) -> str:
    """Return how long ago something was: `3 min`. Clocks that went back give `0 s`."""
    seconds = max(0.0, seconds)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def number(value: float | None) -> str:
    """Return a value in few digits; `-` for None."""
    return "-" if value is None else f"{value:.5g}"
