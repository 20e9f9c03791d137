"""What a subcommand found, for people (tables) and for scripts (one JSON document)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# `rich` takes 0.1 s to import, and commands that print no table come here as well: each function imports what it needs.

_PIPED_WIDTH = 10_000
_READABLE = 12
"""A cell that is longer may be folded into lines of so many characters, and into no narrower ones."""
_GAP = 2
_STYLES = {"committed": "green", "OK": "green", "damaged": "bold red", "torn": "yellow"}


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        columns: headings; those that begin with `>` hold numbers and are aligned to the right.
        rows: as many cells as there are columns.
        expendable: columns that are left out, in this order, when the terminal is too narrow.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    expendable: Sequence[str] = ()

    def fitted(self, console: Console) -> Table:
        """Return the table with as many columns as fit."""
        unlimited = console.options.update(width=_PIPED_WIDTH)
        for count in range(len(self.expendable)):
            table = self._table(self.expendable[:count])
            if console.measure(table, options=unlimited).maximum <= console.width:
                return table
        return self._table(self.expendable)

    def least_width(self) -> int:
        """Return how wide a terminal must be for the columns that are never left out, with long cells folded."""
        widths = [
            min(_READABLE, max(len(cell) for cell in (name.lstrip(">"), *(row[number] for row in self.rows))))
            for number, name in enumerate(self.columns)
            if name.lstrip(">") not in self.expendable
        ]
        return sum(widths) + _GAP * (len(widths) - 1)

    def _table(self, left_out: Sequence[str]) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        shown = [number for number, column in enumerate(self.columns) if column.lstrip(">") not in left_out]
        for number in shown:
            name = self.columns[number]
            table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(row[number], style=_STYLES.get(row[number], "")) for number in shown))
        return table


def print_parts(parts: Sequence[Grid | str]) -> None:
    """Write tables and lines of text to stdout: as wide as the terminal, and without one as wide as they are.

    A table that a terminal is far too narrow for is as wide as it is there, too: the terminal breaks its lines.
    """
    from rich.console import Console
    from rich.text import Text

    is_piped = not sys.stdout.isatty()
    unlimited = Console(highlight=False, width=_PIPED_WIDTH)
    terminal = unlimited if is_piped else Console(highlight=False)
    text = ""
    for part in parts:
        is_table = isinstance(part, Grid)
        console = unlimited if is_table and part.least_width() > terminal.width else terminal
        with console.capture() as capture:
            console.print(part.fitted(terminal) if is_table else Text(part), soft_wrap=not is_table)
        text += capture.get()
    if is_piped:  # nothing is wrapped, nor filled up with spaces
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    sys.stdout.write(text)


@dataclass(frozen=True)
class Report:
    """The result of one subcommand.

    Attributes:
        document: what `--json` prints.
        parts: what people see: tables, and lines of text.
        problems: what is wrong, a line each; any makes the exit code 1.
    """

    document: dict[str, Any]
    parts: Sequence[Grid | str]
    problems: Sequence[str] = field(default=())

    def print(self, *, as_json: bool) -> None:
        """Write the document, or the parts and the problems, to stdout."""
        if as_json:
            import msgspec

            sys.stdout.write(msgspec.json.format(msgspec.json.encode(self.document), indent=1).decode() + "\n")
            return
        print_parts((*self.parts, *self.problems))

    @property
    def exit_code(self) -> int:
        """0, or 1 when something is wrong."""
        return 1 if self.problems else 0


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr that something takes its time; yield what tells how far it has come."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True, highlight=False).status(what) as status:
        yield lambda where: status.update(f"{what}: {escape(where)}")


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
    """Return a value in few digits; what is no number is `-`."""
    return "-" if value is None else f"{value:.5g}"
