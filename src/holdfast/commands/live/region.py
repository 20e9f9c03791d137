"""A part of the terminal that is drawn again and again, below lines that scroll.

Nothing is to be put right when its process is killed: the cursor stays visible, the screen is the usual one, and the
last line of the region is empty, so that a prompt, or the `^C` of a terminal, finds a line of its own.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from holdfast.commands.live.charts import Glyphs

_DEFAULT_SIZE = (80, 24)
_NO_TERMINALS = ("", "dumb", "unknown")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal that lines can be drawn on again; None, one that is closed (`>&-`), is none."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM", "") not in _NO_TERMINALS
    except ValueError:  # it is closed
        return False


def _open_again(stream: TextIO) -> int | None:
    """Open the terminal for writing that never waits; None where that is not allowed (it is another user's).

    Its own opening: a mode that is set for `stream` is set for whoever shares it, such as the shell.
    """
    try:
        return os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal that `stream` is."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return _DEFAULT_SIZE
    # A terminal that nobody has told its size has none.
    return (columns, lines) if columns and lines else _DEFAULT_SIZE


class Region:
    """The region at the end of a terminal; used as a context manager.

    While it is there, what is written to `sys.stdout`, and to `sys.stderr` on the same terminal, appears above it.
    """

    def __init__(self, stream: TextIO, glyphs: Glyphs) -> None:
        self._stream = stream
        self._glyphs = glyphs
        self._asked: list[Text] = []
        self._drawn: list[Text] = []  # as they were cut
        self._width = 0
        self._lock = threading.RLock()
        self._replaced: dict[str, TextIO] = {}
        self._continued: Callable[[int, FrameType | None], object] | int | None = None
        self._is_open = False
        self._terminal: int | None = None
        self._owed = b""  # of a frame that the terminal had no room for

    def __enter__(self) -> Region:
        self._is_open = True
        self._terminal = _open_again(self._stream)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream) and self._is_on(stream):
                self._replaced[name] = stream
                setattr(sys, name, _Above(self, stream))
        if threading.current_thread() is threading.main_thread():
            self._continued = signal.signal(signal.SIGCONT, lambda *_: self.forget())
        return self

    def __exit__(self, *_: object) -> None:
        for name, stream in self._replaced.items():
            getattr(sys, name).end()
            setattr(sys, name, stream)
        self._replaced.clear()
        if self._continued is not None:
            signal.signal(signal.SIGCONT, self._continued)
        with self._lock:
            self._write(self._erase())
            self._is_open = False
            if self._terminal is not None:
                os.close(self._terminal)
                self._terminal = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        return terminal_size(self._stream)

    def forget(self) -> None:
        """Take nothing for drawn: others have used the terminal meanwhile."""
        self._asked, self._drawn = [], []

    def draw(self, lines: Sequence[Text]) -> None:
        """Draw `lines` in place of those that are there; each is cut where the terminal ends.

        Nothing waits for a terminal that takes no output (Ctrl-S, text being selected, a connection that hangs).
        """
        with self._lock:
            if not self._is_open or not self._is_in_front() or not self._takes_output():
                return
            lines = [*lines, Text("")]
            if lines != self._asked or self.size[0] != self._width:
                self._write_now(self._erase() + self._frame(lines))

    def print(self, text: str) -> None:
        """Print lines above."""
        with self._lock:
            asked = self._asked
            self._write(self._erase() + text + "\n" + (self._frame(asked) if asked else ""))

    def _is_on(self, stream: TextIO) -> bool:
        """Whether `stream` is the terminal that is drawn on."""
        return os.fstat(stream.fileno()).st_rdev == os.fstat(self._stream.fileno()).st_rdev

    def _is_in_front(self) -> bool:
        """Whether this process is not in the background, where the terminal is somebody else's."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # it is not the terminal that controls this process
            return True

    def _erase(self) -> str:
        """Return what takes the cursor to the begin of the region and clears the screen from there.

        A terminal that became narrower has broken the lines that were longer.
        """
        if not self._drawn:
            return ""
        width = max(1, self.size[0])
        above = sum(max(1, -(-cell_len(line.plain) // width)) for line in self._drawn[:-1])
        self._asked, self._drawn = [], []
        return "\r" + (f"\x1b[{above}A" if above else "") + "\x1b[J"

    def _frame(self, lines: Sequence[Text]) -> str:
        self._width = self.size[0]
        # One column stays free: at the last one terminals differ in where the cursor is then.
        shown = [cut(line, self._width - 1, self._glyphs) for line in lines]
        self._asked, self._drawn = list(lines), shown
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=10_000, highlight=False, emoji=False, markup=False)
        for number, line in enumerate(shown):
            console.print(line, end="" if number == len(shown) - 1 else "\n", soft_wrap=True)
        return out.getvalue() + "\r"

    def _takes_output(self) -> bool:
        """Whether the terminal has taken all of the last frame, and has room for some of another."""
        if self._terminal is None:
            poll = select.poll()
            poll.register(self._stream.fileno(), select.POLLOUT)
            return bool(poll.poll(0))
        if self._owed:
            self._write_now("")
        return not self._owed

    def _write_now(self, text: str) -> None:
        """Write what the terminal has room for now; the rest is owed."""
        if self._terminal is None:
            self._write(text)
            return
        data = self._owed + text.encode(self._stream.encoding, "backslashreplace")
        try:
            self._owed = data[os.write(self._terminal, data) :]
        except BlockingIOError:
            self._owed = data
        except OSError:  # it is gone; the run goes on
            self._owed = b""

    def _write(self, text: str) -> None:
        owed, self._owed = self._owed.decode(self._stream.encoding, "ignore"), b""
        if owed or text:
            self._stream.write(owed + text)
            self._stream.flush()


def cut(line: Text, width: int, glyphs: Glyphs) -> Text:
    """Return `line` in at most `width` columns, without what a terminal would act on."""
    plain = line.plain
    if not plain.isprintable() or (glyphs.is_ascii and not plain.isascii()):
        clean = "".join(character if character.isprintable() else "?" for character in plain)
        if glyphs.is_ascii:
            clean = clean.encode("ascii", "replace").decode()
        spans = line.spans
        line = Text(clean)
        line.spans = spans
    else:
        line = line.copy()
    if line.cell_len > width:
        line.truncate(max(0, width - 1))
        line.append(glyphs.cut if width > 0 else "")
    return line


class _Above(io.TextIOBase):
    """Takes the place of a stream of the terminal, and has its lines printed above the region."""

    def __init__(self, region: Region, stream: TextIO) -> None:
        self._region = region
        self._stream = stream
        self._begun = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - of whom it stands for
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        whole, newline, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if newline:
            self._region.print(whole)
        return len(text)

    def end(self) -> None:
        """Print what has no end of a line."""
        if self._begun:
            self.write("\n")
