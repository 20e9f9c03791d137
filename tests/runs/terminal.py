"""A command in a terminal of its own: what is on the screen, keys, and changes of its size."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

from tests.runs.processes import HANG_S, answer_when

_UNSET = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES", "LC_ALL", "LC_CTYPE")


class Terminal:
    """Runs a command in a pseudo terminal; used as a context manager, which kills what is left of it."""

    def __init__(
        self, argv: Sequence[str], *, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""  # all that was written
        self._master, slave = pty.openpty()
        self._set_size(columns, lines)
        kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(environment or {})},
            # Of a session of its own, with this terminal as the one that controls it: Ctrl-C then is a signal.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.modes = termios.tcgetattr(slave)
        self._slave = slave
        os.set_blocking(self._master, False)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self._read()
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def type(self, keys: str) -> None:
        """Press keys; `\\x03` is Ctrl-C."""
        os.write(self._master, keys.encode())

    @property
    def screen(self) -> list[str]:
        """The lines that are to be seen, without the empty ones at the end."""
        self._read()
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    @property
    def has_cursor(self) -> bool:
        self._read()
        return not self._screen.cursor.hidden

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except (BlockingIOError, OSError):  # nothing now, or nobody is left
                return
            if not data:
                return
            self.raw += data
            self._stream.feed(data)

    def wait_for(self, what: str | Callable[[list[str]], bool]) -> list[str]:
        """Return the screen as soon as a text, or what a function looks for, is on it."""
        is_there = what if callable(what) else lambda screen: any(what in line for line in screen)
        return answer_when(lambda: self.screen, is_there)

    def end(self) -> int:
        deadline = time.monotonic() + HANG_S
        while self.process.poll() is None:
            self._read()  # or it waits for room in the terminal
            assert time.monotonic() < deadline, "it does not end:\n" + "\n".join(self.screen)
            time.sleep(0.02)
        self._read()
        return self.process.returncode
