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
    ahead_s = 0.0
    real = time.monotonic
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


_TIMEOUT_S = 120.0
_RUN = f"""
import sys, time
from pathlib import Path
real, an_hour_later = time.monotonic, Path(sys.argv[1]) / "an_hour_later"
time.monotonic = lambda: real() + 3600 * an_hour_later.exists()
from holdfast.config import TrainerConfig
from holdfast.process.heartbeat import HEARTBEAT_ENV
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.failures import RestartLimit, RestartPolicy, StorageBackoff
from holdfast.run.run_dir import RunDir
from holdfast.launcher.plan import Plan
from holdfast.launcher.restarts import watch

run_dir = RunDir(Path(sys.argv[1]))
run_dir.create()
(run_dir.path / "rollouts").mkdir()
WORK = '''
import sys, time
from pathlib import Path
from holdfast.process.heartbeat import start_heartbeat
start_heartbeat()
print("works", flush=True)
until = Path(sys.argv[1])
while not until.exists():
    time.sleep(0.05)
(until.parent / sys.argv[2]).mkdir(parents=True, exist_ok=True)
'''
until = str(run_dir.path / "go_on")
commands = {{
    name: [sys.executable, "-c", WORK, until, made]
    for name, made in (("trainer", "weights/step_1"), ("orchestrator", "rollouts/step_1"))
}}
config = TrainerConfig.model_validate({{"output_dir": sys.argv[1], "max_steps": 1}})
plan = Plan(Attempt(run_dir, 1, None), commands, config, [])
healing = RestartPolicy(
    lambda: plan, RestartLimit(0, 600), StorageBackoff(0), heartbeat_timeout_s={_TIMEOUT_S}
)
sys.exit(watch(plan, healing))
"""


@pytest.mark.clock
def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """The launcher, which wakes first, has nobody's beat of late; nobody is killed for that."""
    run = tmp_path / "run"
    run.mkdir()
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
