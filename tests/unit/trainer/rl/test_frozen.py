"""A job of which everything was frozen for a while goes on: no time passes for it meanwhile, and nothing is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from holdfast.launcher.liveness import LivenessMonitor
from holdfast.orchestrator.main import FreezeTolerantLoop
from holdfast.process.heartbeat import FROZEN_S, PERIOD_S
from holdfast.run import journal
from tests.runs.processes import HANG_S


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets seconds pass in which this process does not run."""
    ahead_s, real = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead_s)

    def pass_s(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds

    return pass_s


def test_nobody_was_silent_while_the_launcher_was_frozen(tmp_path: Path, leap: Callable[[float], None]) -> None:
    beats = tmp_path / "trainer"
    beats.touch()
    monitor = LivenessMonitor(beats)
    monitor.silent_s()
    leap(600)
    assert monitor.silent_s() < FROZEN_S


def test_deadlines_stand_still(tmp_path: Path, leap: Callable[[float], None]) -> None:
    """Of the trainer's wait for a batch, and of all that asyncio waits for: environments, engines, weights."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            leap(3600)
        return looks > 5

    assert not journal.wait_for(tmp_path / "batch", timeout_s=60, unless=look)
    assert looks == 6, "the wait ended before it was asked to"

    async def answer() -> str:
        async with asyncio.timeout(60):
            leap(3600)
            await asyncio.sleep(0.01)
            return "answered"

    with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
        assert runner.run(answer()) == "answered"


_RUN = """
import sys, time
from pathlib import Path
real, an_hour_later = time.monotonic, Path(sys.argv[1]) / "an_hour_later"
time.monotonic = lambda: real() + 3600 * an_hour_later.exists()
from tests.runs.stand_ins import Stands

work = "print('works', flush=True)\\nwhile not Path('go_on').exists(): time.sleep(0.05)\\nmade({!r})"
programs = {"trainer": work.format("weights/step_1"), "orchestrator": work.format("rollouts/step_1")}
sys.exit(Stands(Path(sys.argv[1])).watch(restarts=0, **programs))
"""


@pytest.mark.clock
def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """The launcher, which wakes first, has nobody's beat of late; nobody is killed for that."""
    run = tmp_path / "run"
    launcher = psutil.Popen([sys.executable, "-c", _RUN, str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    logs = [run / "logs" / "attempt_1" / f"{name}.log" for name in ("trainer", "orchestrator")]
    while not all(log.exists() and "works" in log.read_text() for log in logs):
        assert launcher.poll() is None
        time.sleep(0.05)
    time.sleep(PERIOD_S / 2)  # the launcher has heard the first beats, and there is no other yet
    everybody = [launcher, *launcher.children(recursive=True)]
    for process in everybody:
        os.kill(process.pid, signal.SIGSTOP)
    (run / "an_hour_later").touch()
    for process in everybody:
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)  # the launcher looks, and hears of nobody
    (run / "go_on").touch()
    output, _ = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 0, output.decode()
    assert b"sent no heartbeat" not in output
