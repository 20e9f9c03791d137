"""One run that is interrupted again and again, each time in another way, ends as the run that nothing disturbed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.faults.held_steps import ASKED_TO_STOP, NEVER, at_start, held_after
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.ports import free_port
from tests.runs.rl import (
    SMALL_BATCH,
    CompletedRun,
    RlRun,
    assert_same_end,
    complete,
    last_step,
    succeeded,
)

pytestmark = pytest.mark.launch

# Ctrl-C must stop a run in seconds, also on a busy machine.


def _interrupt_start(run: RlRun) -> None:
    run.wait_for_output("importing torch")
    run.interrupt(signal.SIGTERM)


def _wait_for_step(run: RlRun, step: int) -> None:
    """Wait until this attempt has trained a step: that one, or a later one where the attempt before came further."""
    run.wait_for_match(r"\(attempt \d+\)")
    run.wait_for_step(max(step, last_step(run.run_dir) + 1))


def _kill_rank(run: RlRun) -> None:
    _wait_for_step(run, 3)
    launcher_of_ranks, rank = run.find("holdfast.trainer.launch")
    assert rank.ppid() == launcher_of_ranks.pid
    rank.kill()


def _kill_orchestrator(run: RlRun) -> None:
    _wait_for_step(run, 6)
    (orchestrator,) = run.find("holdfast.orchestrator.main")
    orchestrator.kill()


def _kill_launcher(run: RlRun) -> None:
    _wait_for_step(run, 9)
    run.interrupt(signal.SIGKILL)


def _interrupt(run: RlRun) -> None:
    _wait_for_step(run, 11)
    run.interrupt(signal.SIGINT)


def _terminate(run: RlRun) -> None:
    _wait_for_step(run, 13)
    run.interrupt(signal.SIGTERM)


# In this order, each in an attempt of its own; expected: exit code, and what the launcher says (killed: nothing).
_INTERRUPTIONS: dict[str, tuple[Callable[[RlRun], None], int, str]] = {
    "SIGTERM at the start": (
        _interrupt_start,
        143,
        f"stopped at step 0 of {REFERENCE_STEPS}, before anything was trained",
    ),
    "SIGKILL of a rank": (_kill_rank, 1, "error: trainer: rank 0 was killed by signal 9\n       log: "),
    "SIGKILL of the orchestrator": (
        _kill_orchestrator,
        1,
        "error: orchestrator was killed by signal 9; the last lines",
    ),
    "SIGKILL of the launcher": (_kill_launcher, -9, ""),
    "SIGINT": (_interrupt, 130, "SIGINT: saving the current step"),
    "SIGTERM": (_terminate, 143, "SIGTERM: saving the current step"),
}


_FIVE_STEPS = (*SMALL_BATCH, "--max-steps", "5", "--ckpt.interval", "2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    flags = (*_FIVE_STEPS, "--inference.server.port", str(free_port()))
    return succeeded(tmp_path_factory.mktemp("straight") / "run", *flags)


@pytest.mark.everyday
def test_everything_is_killed_at_once_and_the_run_goes_on(straight: CompletedRun, tmp_path: Path) -> None:
    """With a server of its own, so that nothing at all is left."""
    flags = (*_FIVE_STEPS, "--inference.server.port", str(free_port()), "--ckpt.resume-step", "auto")
    with RlRun(tmp_path / "run", *flags, environment=at_start(held_after(4, until=NEVER))) as run:
        run.wait_for_step(3)
        run.wait_for(run.run_dir.committed_steps, "the checkpoint of step 2, which is saved behind the training")
        started = run.processes()
        assert len(started) >= 4, started  # trainer, rank, orchestrator, inference
        run.interrupt(signal.SIGKILL)
        for process in started:
            if process.is_running():
                process.kill()
        killed = complete(run)
    assert killed.exit_code == -signal.SIGKILL and not killed.survivors
    resumed = succeeded(tmp_path / "run", *flags)
    assert "resuming from step" in resumed.output
    assert_same_end(resumed, straight, 5)


@dataclass(frozen=True)
class Interrupted:
    """One attempt.

    Attributes:
        run: how it ended.
        committed: the checkpoints that were there afterwards.
    """

    run: CompletedRun
    committed: list[int]


@dataclass(frozen=True)
class DisturbedRun:
    """All attempts by the name of their interruption, and the last one, which ended by itself."""

    run_dir: RunDir
    attempts: dict[str, Interrupted]
    last: CompletedRun


@pytest.fixture(scope="module")
def disturbed(rl_server: UsedServer, tmp_path_factory: pytest.TempPathFactory) -> DisturbedRun:
    directory = tmp_path_factory.mktemp("disturbed") / "run"
    by_hand = ("--max-restarts", "0")
    flags = (*rl_server.flags, "--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2", *by_hand)
    resume = ("--ckpt.resume-step", "auto")
    attempts: dict[str, Interrupted] = {}
    held = at_start(held_after(REFERENCE_STEPS - 2, until=ASKED_TO_STOP))
    for name, (interrupt, _, _) in _INTERRUPTIONS.items():
        with RlRun(directory, *flags, *resume, environment=held) as run:
            interrupt(run)
            run.wait()
            completed = complete(run)
        run_dir = run.run_dir
        attempts[name] = Interrupted(completed, run_dir.committed_steps())
    with RlRun(directory, *flags, *resume) as run:
        last = complete(run)
    return DisturbedRun(run.run_dir, attempts, last)


@pytest.mark.parametrize("name", _INTERRUPTIONS)
def test_everything_stops_and_says_why(disturbed: DisturbedRun, name: str) -> None:
    _, exit_code, message = _INTERRUPTIONS[name]
    attempt = disturbed.attempts[name]
    assert attempt.run.exit_code == exit_code, attempt.run.output
    assert message in attempt.run.output
    assert not attempt.run.survivors
    assert "Traceback" not in attempt.run.output


def test_the_end_of_a_dead_process_log_is_shown(disturbed: DisturbedRun) -> None:
    attempt = disturbed.attempts["SIGKILL of the orchestrator"]
    log = (disturbed.run_dir.logs(3) / "orchestrator.log").read_text().splitlines()
    assert log[-1] in attempt.run.output


def test_the_run_goes_on_from_the_newest_checkpoint(disturbed: DisturbedRun) -> None:
    attempts = list(disturbed.attempts.values())
    assert attempts[0].committed == []
    for before, after in zip(attempts, [*(attempt.run for attempt in attempts[1:]), disturbed.last], strict=True):
        start = f"resuming from step {before.committed[-1]} in" if before.committed else "starting afresh in"
        assert start in after.output


def test_the_end_is_that_of_the_undisturbed_run(disturbed: DisturbedRun, reference: CompletedRun) -> None:
    assert_same_end(disturbed.last, reference, REFERENCE_STEPS)
