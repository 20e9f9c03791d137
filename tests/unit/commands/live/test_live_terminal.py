"""The live view and `monitor` in real terminals, of runs whose files the test writes."""

from __future__ import annotations

import json
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.commands.live.charts import ASCII
from holdfast.commands.live.region import Region
from holdfast.shared.files.run_dir import RunDir
from tests.builders.checkpoint_files import write_checkpoint
from tests.runs.processes import catches, wait_until
from tests.runs.terminal import Terminal

# A launcher without processes: it shows what others write, and does what it reads from a file of words.
_LAUNCHER = """
import sys, time
from pathlib import Path
from holdfast.commands.launcher.console import Console
from holdfast.shared.files.run_dir import RunDir
run_dir = RunDir(Path(sys.argv[1])); words = run_dir.path / "words"; done = 0
print("trainer on the CPU", flush=True)
try:
    with Console(run_dir, attempt=2, first_step=0, max_steps=40) as console:
        while True:
            console.refresh()
            said = words.read_text().splitlines() if words.exists() else []
            for word in said[done:]:
                if word == "end": sys.exit(0)
                print(word, file=sys.stderr if word.startswith("WARNING") else sys.stdout)
            done = len(said)
            time.sleep(0.02)
except KeyboardInterrupt:
    print("interrupted"); sys.exit(130)
"""


class Run:
    """The files of a run of `rl` that goes on."""

    def __init__(self, path: Path) -> None:
        self.dir = RunDir(path)
        self.dir.path.mkdir()
        self.dir.create()
        self.attempt = 2

    def event(self, process: str, phase: str, **fields: object) -> None:
        logs = self.dir.logs(self.attempt)
        logs.mkdir(parents=True, exist_ok=True)
        with open(logs / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": 4e9, "process": process, "phase": phase, **fields}) + "\n")

    def steps(self, *steps: int) -> None:
        with open(self.dir.metrics, "a") as file:
            for step in steps:
                metrics = {"step": step, "reward/mean": step / 40, "loss": -0.01, "grad_norm": 1.0, "lr": 1e-4,
                           "mismatch_kl": 1e-3, "tokens_per_s": 1234.5, "time/step": 2.0, "memory_gib": 0.5,
                           "time/wait_for_batch": 1.24, "time/generate": 1.9, "time/batch": 2.0, "entropy": 0.4,
                           "engine/idle_share": 0.1, "staleness/mean": 1.0, "staleness/max": 2.0}  # fmt: skip
                file.write(json.dumps(metrics) + "\n")

    def say(self, word: str) -> None:
        with open(self.dir.path / "words", "a") as file:
            file.write(word + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "reverse_text_rl")


Open = Callable[..., Terminal]


@pytest.fixture
def launcher(run: Run) -> Callable[..., Terminal]:
    return lambda **options: Terminal([sys.executable, "-c", _LAUNCHER, str(run.dir.path)], **options)


def monitor(*words: object, **options: object) -> Terminal:
    return Terminal([sys.executable, "-m", "holdfast", "monitor", *map(str, words)], **options)  # pyright: ignore


def view(screen: list[str]) -> list[str]:
    """Return the lines from the last rule on."""
    rules = [number for number, line in enumerate(screen) if line.startswith(("── ", "-- "))]
    return screen[rules[-1] :] if rules else []


def test_a_run_is_drawn_below_its_lines(run: Run, launcher: Open) -> None:
    with launcher() as terminal:
        run.event("inference", "loading vllm")
        screen = terminal.wait_for(lambda screen: any("inference    loading vllm (" in line for line in view(screen)))
        assert "usually 15-60 s" in "".join(view(screen)) and "starting" in view(screen)[1]
        run.event("trainer", "waiting for batches", step=0, max_steps=40)
        run.event("trainer", "ALERT: entropy fell to 0.01 nats", step=2)
        run.steps(*range(1, 11))
        write_checkpoint(run.dir, 8)
        screen = terminal.wait_for("step 8 committed")
        shown = "\n".join(view(screen))
        assert "reverse_text_rl" in shown and "attempt 2" in shown and "0 restarts" in shown
        assert "step 10/40" in shown and "25 %" in shown and "left " in shown
        assert "▁" in shown and "█" in shown and "staleness 1 (max 2)" in shown and "1,234 tok/s" in shown
        assert "bottleneck: generation (trainer waits 62 % of a step)" in shown
        assert "2 steps since" in shown and "ALERT step 2: entropy fell" in shown
        assert [line for line in screen if line.startswith("step 10/40  reward")], "and its line above"
        assert screen.count(view(screen)[0]) == 1, "it was drawn in place"


@pytest.mark.parametrize(("columns", "lines"), [(120, 40), (50, 15), (20, 5)])
def test_the_view_fits_into_any_terminal(run: Run, launcher: Open, columns: int, lines: int) -> None:
    with launcher(columns=columns, lines=lines) as terminal:
        run.event("trainer", "ALERT: " + "a long story " * 20, step=2)
        run.event("trainer", "WARNING: \x1b[2J ünïcödé \U0001f600" * 9)
        run.steps(*range(1, 31))
        screen = terminal.wait_for(lambda screen: any("step 30/40" in line and "75 %" in line for line in screen))
        below = view(screen)
        assert len(below) <= lines * 2 / 3 and all(len(line) < columns for line in below)
        run.steps(31, 32)
        screen = terminal.wait_for(lambda screen: any("step 32/40" in line and "80 %" in line for line in screen))
        assert sum(line.startswith("── ") for line in screen) <= 1, "\n".join(screen)


def test_what_others_print_does_not_tear_it(run: Run, launcher: Open) -> None:
    with launcher() as terminal:
        for number in range(30):
            run.say(f"WARNING: line {number}" if number % 2 else f"line {number}")
            run.steps(number + 1)
        screen = terminal.wait_for(lambda screen: any("line 29" in line for line in screen) and "step 30/40" in
                                   "".join(view(screen)[:2]))  # fmt: skip
        above = screen[: -len(view(screen))]
        assert all(line.startswith(("line ", "WARNING: line ", "step ")) for line in above), "\n".join(screen)
        run.say("end")
        assert terminal.end() == 0
        assert not view(terminal.screen), "it is gone at the end"


def test_another_size_is_drawn_anew(run: Run, launcher: Open) -> None:
    with launcher(columns=100, lines=30) as terminal:
        run.steps(*range(1, 11))
        terminal.wait_for(lambda screen: "step 10/40" in "".join(view(screen)[:2]))
        for columns, lines in ((60, 30), (60, 12), (110, 40)):
            terminal.resize(columns, lines)
            screen = terminal.wait_for(lambda screen, size=columns: bool(view(screen)) and len(view(screen)[0]) in
                                       (size - 1, size - 2))  # fmt: skip
            assert sum(line.startswith("── ") for line in screen) == 1, "\n".join(screen)


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_the_terminal_is_left_as_it_was(run: Run, launcher: Open, how: str) -> None:
    with launcher() as terminal:
        run.steps(1)
        terminal.wait_for("step 1/40")
        if how == "SIGINT":
            terminal.type("\x03")
        else:
            terminal.process.send_signal(getattr(signal, how))
        code = terminal.end()
        assert code == (130 if how == "SIGINT" else -getattr(signal, how))
        assert terminal.has_cursor and terminal.modes_now == terminal.modes
        assert b"\x1b[?1049h" not in terminal.raw and b"\x1b[?25l" not in terminal.raw


def test_no_color_and_a_locale_without_unicode(run: Run, launcher: Open) -> None:
    with launcher(environment={"NO_COLOR": "1", "LANG": "C"}) as terminal:
        run.event("trainer", "ALERT: ü", step=1)
        run.steps(*range(1, 21))
        screen = terminal.wait_for(lambda screen: "step 20/40" in "".join(view(screen)[:2]))
        shown = "\n".join(view(screen))
        assert shown.isascii() and "#####" in shown and "@" in shown
        assert b"\x1b[3" not in terminal.raw and b"\x1b[1;3" not in terminal.raw, "a colour"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_can_do_nothing_gets_lines(run: Run, launcher: Open, term: str) -> None:
    with launcher(environment={"TERM": term}) as terminal:
        run.say("it is on")
        terminal.wait_for("it is on")  # what is older is not told again
        run.event("inference", "loading vllm")
        run.steps(1, 2)
        run.say("end")
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.raw
        said = terminal.raw.decode().split("\r\n")
        assert said[:2] == ["trainer on the CPU", "it is on"] and "loading vllm (usually" in said[2]
        assert said[3].startswith("step  1/40  reward  0.025  loss  -0.0100  grad   1.000") and len(said) == 6


def test_in_the_background_nothing_is_drawn(run: Run, launcher: Open) -> None:
    script = f'{sys.executable} -c "$CODE" {run.dir.path} & wait'
    with Terminal(["bash", "-mc", script], environment={"CODE": _LAUNCHER}) as terminal:
        run.say("it is on")
        terminal.wait_for("it is on")
        run.steps(1, 2)
        terminal.wait_for("step  2/40")
        run.say("end")
        assert terminal.end() == 0
        assert "──".encode() not in terminal.raw


@pytest.mark.launch
def test_a_monitor_follows_a_run_through_a_resume(run: Run) -> None:
    run.event("trainer", "training", step=0, max_steps=40)
    run.steps(*range(1, 21))
    with monitor(run.dir.path, "--interval", "0.05") as terminal:
        screen = terminal.wait_for("step 20/40")
        assert "stopped" in screen[0] and "attempt 2" in screen[0], "nobody holds its lock"
        shorter = run.dir.metrics.with_name("shorter")
        shorter.write_text("".join(run.dir.metrics.read_text().splitlines(keepends=True)[:5]))
        shorter.rename(run.dir.metrics)
        terminal.wait_for("step 5/40")
        run.attempt = 3
        run.event("trainer", "training", step=5, max_steps=60)
        run.event("launcher", "starting again", restarted="trainer")
        run.steps(6, 7)
        screen = terminal.wait_for("step 7/60")
        screen = terminal.wait_for("attempt 3")
        assert "1 restart" in screen[0]
        run.event("launcher", "ended", exit_code=0, step=7)
        terminal.wait_for("finished")
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.has_cursor and terminal.modes_now == terminal.modes
        assert "finished" in terminal.screen[0], "what was known last stays"


@contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Have another process hold the lock of a run."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        run_dir.lock()
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(pid, 0)


@pytest.mark.launch
def test_several_runs_are_rows_and_their_lock_says_who_lives(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    run.steps(1, 2)
    other.steps(1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with locked(run.dir), monitor(run.dir.path, other.dir.path, "--interval", "0.05", columns=50, lines=12) as terminal:
        screen = terminal.wait_for(lambda screen: any("reverse_text_rl  running" in line for line in screen))
        assert screen[0].startswith("run") and [
            line for line in screen if line.startswith("other") and "stopped" in line
        ]
        assert all(len(line) < 50 for line in screen)
        terminal.type("\x03")
        assert terminal.end() == 0
        assert terminal.modes_now == terminal.modes
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "run.lock"}
    assert {path: time for path, time in after.items() if path in before and path != run.dir.path} == {
        path: time for path, time in before.items() if path != run.dir.path
    }, "nothing was written"


@pytest.mark.launch
def test_a_monitor_waits_for_a_run_that_begins(tmp_path: Path) -> None:
    with monitor(tmp_path / "coming", "--wait", "--interval", "0.05") as terminal:
        terminal.wait_for("waiting")
        run = Run(tmp_path / "coming")
        run.steps(1)
        terminal.wait_for("step 1")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0


@pytest.mark.launch
def test_keys_are_left_alone_from_the_background(run: Run) -> None:
    run.steps(1)
    script = f"{sys.executable} -m holdfast monitor {run.dir.path} & wait"
    with Terminal(["bash", "-mc", script]) as terminal:
        bash = psutil.Process(terminal.process.pid)

        def is_watching() -> bool:
            return any(one.status() == psutil.STATUS_STOPPED or catches(one.pid, signal.SIGCONT)
                       for one in bash.children())  # fmt: skip

        wait_until(is_watching, "the begin of its view")
        (process,) = bash.children()
        process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0, "one that is stopped would never end"
        assert terminal.modes_now == terminal.modes


@pytest.mark.launch
def test_keys_come_again_after_others_had_the_terminal(run: Run) -> None:
    run.steps(1)
    with monitor(run.dir.path) as terminal:
        terminal.wait_for("step 1")
        terminal.wait_for(lambda _: terminal.modes_now != terminal.modes)
        termios.tcsetattr(terminal._slave, termios.TCSANOW, terminal.modes)  # as a shell does after Ctrl-Z
        terminal.wait_for(lambda _: terminal.modes_now != terminal.modes)
        terminal.type("q")
        assert terminal.end() == 0 and terminal.modes_now == terminal.modes


@pytest.mark.launch
def test_a_monitor_needs_no_stdin(run: Run) -> None:
    run.steps(1)
    with Terminal(["bash", "-c", f"exec {sys.executable} -m holdfast monitor {run.dir.path} <&-"]) as terminal:
        terminal.wait_for("step 1")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0


def test_another_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    descriptors = [*os.openpty(), *os.openpty()]
    with open(descriptors[1], "w") as out, open(descriptors[3], "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with Region(out, ASCII):
            assert sys.stdout is not out and sys.stderr is err
        assert sys.stdout is out
    for descriptor in (descriptors[0], descriptors[2]):
        os.close(descriptor)
