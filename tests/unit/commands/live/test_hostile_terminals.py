"""Whatever becomes of a terminal, or of what is drawn on it: the run goes on."""

from __future__ import annotations

import io
import os
import pty
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from holdfast.commands.launcher import console as console_module
from holdfast.commands.launcher.console import Console
from holdfast.commands.live.charts import glyphs_for
from holdfast.commands.live.region import Region
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.child import _LossyFile
from tests.runs.terminal import Terminal

_FRAMES = 1000
"""Far more than any terminal keeps for who does not read it."""


class Screen:
    """A terminal that nobody reads until `read` does."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.stream = io.TextIOWrapper(io.FileIO(slave, "w"), "utf-8", write_through=True)

    def read(self) -> bytes:
        """Return all that was written."""
        data = b""
        while True:
            try:
                data += os.read(self.master, 1 << 16)
            except OSError:  # nothing now, or nobody is left
                return data

    def fill(self) -> None:
        """Write until it takes no more."""
        number = os.open(os.ttyname(self.stream.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            while True:
                os.write(number, b"x" * 100)
        except BlockingIOError:
            os.close(number)


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.stream.close()
    os.close(screen.master)


def _frame(number: int) -> list[Text]:
    return [Text(f"frame {number} of ünread lines " + "." * 40) for _ in range(10)]


def test_a_terminal_that_takes_no_output_holds_nobody_up(screen: Screen) -> None:
    with Region(screen.stream, glyphs_for("utf-8")) as region:
        for number in range(_FRAMES):
            region.draw(_frame(number))
        before = screen.read()
        assert before.count(b"frame 0 ") == 10 and f"frame {_FRAMES - 1} ".encode() not in before
        region.draw(_frame(_FRAMES))
        region.draw(_frame(_FRAMES + 1))
        after = screen.read()
        assert after.count(f"frame {_FRAMES + 1} ".encode()) == 10, "it goes on where there is room again"
        (before + after).decode()  # no character was torn
        region.print("a line")
        assert b"a line" in screen.read()


def test_lines_come_behind_what_is_left_of_a_frame(screen: Screen) -> None:
    with Region(screen.stream, glyphs_for("utf-8")) as region:
        number = 0
        while not region._owed:
            region.draw(_frame(number))
            number += 1
        data = screen.read()
        region.print("a line")
        data += screen.read()
        assert data.index(f"frame {number - 1} ".encode()) < data.index(b"a line")


def test_a_terminal_that_cannot_be_opened_again_is_not_waited_for(screen: Screen) -> None:
    """As one of another user."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    region = Region(screen.stream, glyphs_for("utf-8"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        region.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert region._terminal is None
    region.draw([Text("seen")])
    assert b"seen" in screen.read()
    screen.fill()
    region.draw([Text("not seen")])
    assert b"not seen" not in screen.read()
    region.__exit__()


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    screen = Screen()
    stream = io.TextIOWrapper(_LossyFile(screen.stream.fileno(), "w", closefd=False), "utf-8", write_through=True)
    with Region(stream, glyphs_for("utf-8")) as region:
        os.close(screen.master)
        for number in range(3):
            region.draw(_frame(number))
    screen.stream.close()


def test_output_that_would_have_to_wait_is_dropped(screen: Screen) -> None:
    """Another program left the mode, which is shared, so that nothing waits."""
    screen.fill()
    os.set_blocking(screen.stream.fileno(), False)
    output = _LossyFile(screen.stream.fileno(), "w", closefd=False)
    assert output.write("ünheard".encode()) == 8
    print("unheard", file=io.TextIOWrapper(io.BufferedWriter(output), "utf-8"), flush=True)
    assert b"heard" not in screen.read()


_LAUNCHER = """
import sys
from pathlib import Path
from holdfast.commands.launcher.console import Console
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.child import make_output_lossy
run_dir = RunDir(Path(sys.argv[1])); make_output_lossy()
with Console(run_dir, attempt=1, first_step=0, max_steps=4) as console:
    run_dir.metrics.write_text('{"step": 1, "loss": 0.5}\\n')
    console.refresh(); console.say("said")
(run_dir.path / "told").write_text(str(console.last_step))
"""


def test_a_run_without_stdout_begins(tmp_path: Path) -> None:
    argv = ["bash", "-c", 'exec "$@" >&- 2>"$0"', str(tmp_path / "errors"), sys.executable, "-c", _LAUNCHER]
    assert subprocess.run([*argv, str(tmp_path)], check=False).returncode == 0, (tmp_path / "errors").read_text()
    assert (tmp_path / "told").read_text() == "1"


def test_a_run_without_stderr_is_drawn(tmp_path: Path) -> None:
    argv = ["bash", "-c", 'exec "$@" 2>&-', "bash", sys.executable, "-c", _LAUNCHER, str(tmp_path)]
    with Terminal(argv) as terminal:
        assert terminal.end() == 0
    assert (tmp_path / "told").read_text() == "1" and "──".encode() in terminal.raw


def test_a_view_that_cannot_be_made_is_left_out(
    tmp_path: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(console_module, "run_view", break_down)
    monkeypatch.setattr(console_module, "_DRAW_S", 0.0)
    monkeypatch.setattr(sys, "stdout", screen.stream)
    monkeypatch.setenv("TERM", "xterm")
    run_dir = RunDir(tmp_path)
    with Console(run_dir, attempt=1, first_step=0, max_steps=4) as console:
        for step in (1, 2):
            with open(run_dir.metrics, "a") as file:
                file.write(f'{{"step": {step}, "loss": 0.5}}\n')
            console.refresh()
    assert console.last_step == 2 and b"step 2/4" in screen.read()
    (record,) = caplog.records
    assert "nothing is drawn any more" in record.message and record.exc_info is not None
