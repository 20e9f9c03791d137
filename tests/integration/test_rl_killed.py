"""One run that is interrupted again and again, each time in another way, ends as the run that nothing disturbed."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.faults.held_steps import ASKED_TO_STOP, NEVER, at_start, held_after
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.ports import free_port
from tests.runs.rl import SMALL_BATCH, CompletedRun, RlRun, assert_same_end, complete, last_step, succeeded

pytestmark = pytest.mark.launch


@dataclass(frozen=True)
class Interruption:
    """What is done to a run after a step, and what must come of it."""

    step: int
    what: signal.Signals | str  # a signal to the launcher; or a module, whose last process is killed
    exit_code: int
    says: str  # what the launcher prints; nothing where it is killed

    def deal(self, run: RlRun) -> None:
        if self.step:
            run.wait_for_match(r"\(attempt \d+\)")
            # Of this attempt: a later one where the attempt before came further.
            run.wait_for_step(max(self.step, last_step(run.run_dir) + 1))
        else:
            run.wait_for_output("importing torch")
        if isinstance(self.what, signal.Signals):
            run.interrupt(self.what)
        else:
            run.find(self.what)[-1].kill()


# In this order, each in an attempt of its own.
_INTERRUPTIONS = {
    "SIGTERM at the start": Interruption(
        0, signal.SIGTERM, 143, f"stopped at step 0 of {REFERENCE_STEPS}, before anything was trained"
    ),
    "SIGKILL of a rank": Interruption(
        3, "holdfast.trainer.launch", 1, "error: trainer: rank 0 was killed by signal 9\n       log: "
    ),
    "SIGKILL of the orchestrator": Interruption(
        6, "holdfast.orchestrator.main", 1, "error: orchestrator was killed by signal 9; the last lines"
    ),
    "SIGKILL of the launcher": Interruption(9, signal.SIGKILL, -9, ""),
    "SIGINT": Interruption(11, signal.SIGINT, 130, "SIGINT: the current step ends and is saved"),
    "SIGTERM": Interruption(13, signal.SIGTERM, 143, "SIGTERM: saving the current step"),
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
class DisturbedRun:
    """Attempts by the name of their interruption, with the steps committed then, and the one that ended by itself."""

    run_dir: RunDir
    attempts: dict[str, tuple[CompletedRun, list[int]]]
    last: CompletedRun


@pytest.fixture(scope="module")
def disturbed(rl_server: UsedServer, tmp_path_factory: pytest.TempPathFactory) -> DisturbedRun:
    directory = tmp_path_factory.mktemp("disturbed") / "run"
    by_hand = ("--max-restarts", "0")
    flags = (*rl_server.flags, "--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2", *by_hand)
    resume = ("--ckpt.resume-step", "auto")
    attempts: dict[str, tuple[CompletedRun, list[int]]] = {}
    held = at_start(held_after(REFERENCE_STEPS - 2, until=ASKED_TO_STOP))
    for name, interruption in _INTERRUPTIONS.items():
        with RlRun(directory, *flags, *resume, environment=held) as run:
            interruption.deal(run)
            attempts[name] = complete(run), run.run_dir.committed_steps()
    with RlRun(directory, *flags, *resume) as run:
        last = complete(run)
    return DisturbedRun(run.run_dir, attempts, last)


@pytest.mark.parametrize("name", _INTERRUPTIONS)
def test_everything_stops_and_says_why(disturbed: DisturbedRun, name: str) -> None:
    attempt, _ = disturbed.attempts[name]
    assert attempt.exit_code == _INTERRUPTIONS[name].exit_code, attempt.output
    assert _INTERRUPTIONS[name].says in attempt.output and "Traceback" not in attempt.output
    assert not attempt.survivors
    if name == "SIGKILL of the orchestrator":
        log = (disturbed.run_dir.logs(3) / "orchestrator.log").read_text().splitlines()
        assert log[-1] in attempt.output, "the end of its log is shown"


def test_the_run_goes_on_from_the_newest_checkpoint(disturbed: DisturbedRun) -> None:
    attempts, committed = zip(*disturbed.attempts.values(), strict=True)
    assert committed[0] == []
    for steps, after in zip(committed, (*attempts[1:], disturbed.last), strict=True):
        start = f"resuming from step {steps[-1]} in" if steps else "starting from scratch in"
        assert start in after.output


def test_the_end_is_that_of_the_undisturbed_run(disturbed: DisturbedRun, reference: CompletedRun) -> None:
    assert_same_end(disturbed.last, reference, REFERENCE_STEPS)
