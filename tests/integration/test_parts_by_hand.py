"""Parts started by the commands of docs/guarantees.md die, are started again, and end as a run of `rl` does."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.pages.documentation import Command, commands
from tests.pages.runs import Checkout
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.rl import SMALL_BATCH, assert_same, exact_metrics, last_step, outcome, succeeded

pytestmark = [pytest.mark.engine, pytest.mark.launch]

_STEPS = 20
_INFERENCE, _TRAINER, _ORCHESTRATOR, _TRAINER_AGAIN, _ORCHESTRATOR_AGAIN = range(5)


class Shells:
    """One shell for each command, in a checkout of its own."""

    def __init__(self, path: Path) -> None:
        self.port = free_port()
        self.checkout = Checkout(path)
        self.commands = commands(ROOT / "docs" / "guarantees.md")
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Give one of the page's commands; with a port, batches and threads that suit a test."""
        command: Command = self.commands[number]
        program, *flags = command.words
        url = f"http://127.0.0.1:{self.port}"
        small = [flag.replace("--orchestrator.", "--") for flag in SMALL_BATCH]
        flags += {
            "inference": ["--server.port", str(self.port), "--engine.threads", "1"],
            "trainer": ["--parallel.threads", "1"],
            "orchestrator": ["--client.urls", f'["{url}"]', *small],
        }[program]
        log = open(self.checkout.path / f"{len(self.started)}_{program}.log", "wb")
        argv = [str(Path(sys.executable).with_name(program)), *flags]
        with log:
            process = subprocess.Popen(
                argv, cwd=self.checkout.path, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        return process

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.checkout.path.glob("*.log")))

    def wait_for(self, condition: Callable[[], bool], *living: subprocess.Popen[bytes]) -> None:
        """Return as soon as `condition` holds; all of `living` must live until then."""
        deadline = time.monotonic() + 2 * HANG_S  # an engine starts, and then some steps are trained
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert all(process.poll() is None for process in living), self.logs()
            time.sleep(0.02)


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    shells = Shells(tmp_path)
    yield shells
    for process in shells.started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.timeout(1800)
def test_parts_started_by_hand_end_as_rl_does(shells: Shells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token on both sides, as servers of other machines need it."""
    run_dir = RunDir(tmp_path / "outputs" / "by_hand")

    def has_trained(step: int) -> Callable[[], bool]:
        return lambda: last_step(run_dir) >= step

    monkeypatch.setenv("HOLDFAST_ADMIN_TOKEN", "s3cret")
    inference, trainer = shells.start(_INFERENCE), shells.start(_TRAINER)
    orchestrator = shells.start(_ORCHESTRATOR)
    shells.wait_for(has_trained(4), inference, trainer, orchestrator)
    orchestrator.kill()
    orchestrator.wait()
    orchestrator = shells.start(_ORCHESTRATOR_AGAIN)
    shells.wait_for(has_trained(12), inference, trainer, orchestrator)
    trainer.kill()
    trainer.wait()
    trainer = shells.start(_TRAINER_AGAIN)
    shells.wait_for(lambda: trainer.poll() is not None, inference)
    shells.wait_for(lambda: orchestrator.poll() is not None, inference)
    assert (trainer.returncode, orchestrator.returncode) == (0, 0), shells.logs()
    assert "resuming from step 10" in shells.logs()
    server = f"http://127.0.0.1:{shells.port}"
    assert httpx.get(f"{server}/weights", timeout=HANG_S).json()["owner"] is None
    flags = ("--inference.server.port", str(shells.port), "--trainer.parallel.threads", "1", *SMALL_BATCH)
    straight = succeeded(tmp_path / "straight", *flags, "--max-steps", str(_STEPS), "--ckpt.interval", "10").run_dir
    assert_same(outcome(run_dir, _STEPS), outcome(straight, _STEPS))
    steps = range(1, _STEPS + 1)
    assert exact_metrics(run_dir, steps) == exact_metrics(straight, steps)
    inference.terminate()
    assert inference.wait(HANG_S) == 0
