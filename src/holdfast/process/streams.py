"""Standard streams that are closed, full or read by nobody: what a command does about them.

Imports nothing that Python has not imported at its start: commands open their streams before all else.
"""

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class OutputFailed(OSError):
    """What a command prints cannot be written: not a failure of its files."""


_failures: "list[OutputFailed]" = []


class _Output(io.FileIO):
    """Says of what it cannot write that it was output; a reader that has gone stays a `BrokenPipeError`."""

    def write(self, data: "Any", /) -> "int | None":
        try:
            return super().write(data)
        except (BrokenPipeError, BlockingIOError):
            raise
        except OSError as error:
            _failures.append(OutputFailed(error.errno, error.strerror))
            raise _failures[-1] from None


def open_closed_streams() -> None:
    """Have stdin, stdout and stderr lead to /dev/null where they are closed (`>&-`). Otherwise the next file that is
    opened gets their number, and whatever a library or a child prints goes into it; and Python has None for them, which
    nobody can write to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))


def mark_output() -> None:
    """Have failures of stdout raise `OutputFailed`, and characters that its encoding lacks raise nothing."""
    stream = sys.stdout
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # PYTHONUNBUFFERED leaves the buffer out
    if isinstance(stream, io.TextIOWrapper) and type(raw) is io.FileIO:
        stream.flush()
        marked = io.BufferedWriter(_Output(raw.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            marked,
            stream.encoding,
            "backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


def raise_swallowed_failure() -> None:
    """Raise the first failure of stdout that there was: argparse passes over those of a long `--help`. Raise
    OutputFailed if there was one."""
    if _failures:
        raise _failures[0]


def drop_output() -> None:
    """Send what is printed from now on, and what was and waits to be written, nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
