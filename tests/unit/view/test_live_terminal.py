"""Launchers and `monitor` in real terminals, of runs whose files the test writes."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.builders.attempts import tell
from tests.runs.terminal import Terminal

# A launcher without processes: it shows what others write, and does what it reads from a file of words.
_LAUNCHER = """
import sys, time
from pathlib import Path
from holdfast.view.console import Console
from holdfast.run.run_dir import RunDir
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
        tell(self.dir, process, phase, attempt=self.attempt, **{"time": time.time() - 2, **fields})

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


SPINNER = ("- ", "\\ ", "| ", "/ ")


def spins(text: str) -> Callable[[list[str]], bool]:
    """Return whether the last line of a screen turns, and has `text`."""
    return lambda screen: bool(screen) and screen[-1].startswith(SPINNER) and text in screen[-1]


def test_a_phase_that_lasts_is_shown_below_the_lines_until_a_step(run: Run, launcher: Open) -> None:
    with launcher(columns=120, lines=150) as terminal:
        run.say("WARNING: it is on")
        terminal.wait_for("WARNING: it is on")
        run.event("inference", "loading vllm")
        terminal.wait_for(spins("inference loading vllm"))
        run.event("trainer", "tokenising", done=500, total=1000, unit="rows", left_s=5.0)
        screen = terminal.wait_for(spins("trainer tokenising 500 of 1,000 rows, left 0:05"))
        assert sum("500 of" in line for line in screen) == 1
        run.say("a line of others " * 5)
        terminal.wait_for(spins("inference loading vllm"))
        run.event("trainer", "waiting for batches", step=0, max_steps=40)
        run.event("trainer", "ALERT: entropy fell to 0.01 nats", step=2)
        run.steps(*range(1, 11))
        screen = terminal.wait_for(lambda screen: not spins("")(screen) and "step 10/40" in "".join(screen))
        shown = "".join(screen)
        assert "reward/mean  0.250" in shown and "ALERT: entropy fell" in shown and "WARNING: it is on" in shown
        assert ("a line of others " * 5).strip() in screen and "loading vllm (usually 15-60 s" in shown
        run.say("end")
        assert terminal.end() == 0 and terminal.has_cursor


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_the_terminal_is_left_as_it_was(run: Run, launcher: Open, how: str) -> None:
    with launcher() as terminal:
        run.event("inference", "loading vllm")
        terminal.wait_for(spins("inference loading vllm"))
        if how == "SIGINT":
            terminal.type("\x03")
        else:
            terminal.process.send_signal(getattr(signal, how))
        assert terminal.end() == (130 if how == "SIGINT" else -signal.SIGKILL)
        assert terminal.has_cursor and terminal.modes_now == terminal.modes
        assert b"\x1b[?1049h" not in terminal.raw


@pytest.mark.parametrize("how", ["dumb", "", "in the background", "not stderr"])
def test_lines_are_all_where_nothing_can_be_drawn(run: Run, how: str) -> None:
    command = f'{sys.executable} -c "$CODE" {run.dir.path}'
    script = {"in the background": f"{command} & wait", "not stderr": f"{command} 2>/dev/null"}.get(how, command)
    term = how if how in ("dumb", "") else "xterm"
    with Terminal(["bash", "-mc", script], columns=200, environment={"TERM": term, "CODE": _LAUNCHER}) as terminal:
        run.say("it is on")
        terminal.wait_for("it is on")  # what is older is not told again
        run.event("inference", "loading vllm")
        run.event("trainer", "loading model", time=time.time() - 60)
        terminal.wait_for("loading model")
        run.steps(1, 2)
        run.say("end")
        assert terminal.end() == 0 and b"\x1b" not in terminal.raw
        said = terminal.raw.decode().split("\r\n")
        assert said[:2] == ["trainer on the CPU", "it is on"] and "loading vllm (usually" in said[2]
        assert said[4].startswith("step  1/40  reward/mean  0.025  loss  -0.0100  grad_norm   1.000")
        assert sum(line.startswith("step") for line in said) == 2 and len(said) <= 8, said


def test_lines_go_where_stdout_goes_while_stderr_is_a_terminal(run: Run, tmp_path: Path) -> None:
    script = f'{sys.executable} -c "$CODE" {run.dir.path} > {tmp_path / "out"}'
    with Terminal(["bash", "-mc", script], environment={"CODE": _LAUNCHER}) as terminal:
        run.event("inference", "loading vllm")
        terminal.wait_for(spins("inference loading vllm"))
        run.steps(1)
        run.say("end")
        assert terminal.end() == 0
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "trainer on the CPU" and lines[-1].startswith("step  1/40") and len(lines) <= 3


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_run_without_a_stream_begins(run: Run, closed: str) -> None:
    run.say("end")
    with Terminal(["bash", "-mc", f'{sys.executable} -c "$CODE" {run.dir.path} {closed}'],
                  environment={"CODE": _LAUNCHER}) as terminal:  # fmt: skip
        assert terminal.end() == 0


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
        terminal.wait_for("step  5/40")
        run.attempt = 3
        run.event("trainer", "training", step=5, max_steps=60)
        run.event("launcher", "starting again", restarted="trainer")
        run.steps(6, 7)
        screen = terminal.wait_for("step  7/60")
        screen = terminal.wait_for("attempt 3")
        assert "1 restart" in screen[0]
        run.event("launcher", "ended", exit_code=0, step=7)
        terminal.wait_for("finished")
        terminal.type("\x03")
        assert terminal.end() == 0
        assert terminal.has_cursor and terminal.modes_now == terminal.modes
        assert "finished" in terminal.screen[0], "what was known last stays"
