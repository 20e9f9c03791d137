"""Stopping a run: a signal saves the current step within the grace, the exit code says so, and no process is left."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from holdfast.errors import NOT_SAVED
from holdfast.launcher.supervisor import ECHO_S
from holdfast.run import manifest
from holdfast.run.journal import STATE_NAME
from holdfast.run.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.faults.held_steps import ASKED_TO_STOP, NEVER, exists, held_after, held_commit
from tests.faults.run_states import differing, end_state
from tests.forking.commands import Run, shared_commands
from tests.runs.processes import HANG_S, command_line, wait_until
from tests.runs.training import LiveSft, run_sft
from tests.unit.trainer.programs.in_process import publish_journal

pytestmark = pytest.mark.launch

STEPS = 12
FLAGS = ("--max-steps", str(STEPS))
Ends = Callable[..., bool]


@dataclass
class Live:
    """A run of `sft` that goes on; what is left of it ends with the test."""

    run: Run
    descendants: list[int] = field(default_factory=list)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.run.output)

    def wait_for(self, text: str) -> None:
        """Wait until the command prints `text`, and note the processes that it has then."""
        wait_until(lambda: text in self.run.log or self.run.has_ended, text)
        assert text in self.run.log, self.run.log
        self.descendants = [child.pid for child in psutil.Process(self.run.pid).children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks: forked children of the trainer."""
        (trainer,) = psutil.Process(self.run.pid).children()
        ranks = [child for child in trainer.children() if command_line(child) == trainer.cmdline()]
        return sorted(ranks, key=lambda process: process.pid)

    def ended(self, ends: Ends) -> int | None:
        """Wait for the end, with which all processes must be gone; return the exit code."""
        code = self.run.wait(HANG_S).code
        assert self.descendants and all(ends(pid) for pid in self.descendants), self.run.log
        return code


Start = Callable[..., Live]


@pytest.fixture(scope="module")
def model(tiny_model: ModelFactory) -> Path:
    return tiny_model(weights=False, attention_dropout=0.3)


@pytest.fixture
def start(tmp_path: Path, model: Path, sft_data: Path) -> Iterator[Start]:
    """Return a start of `sft` with a fault in its trainer."""
    made: list[Live] = []

    def run(*flags: str, fault: str = "", ranks: int = 1) -> Live:
        started = shared_commands().sft(
            tmp_path / "run", model, sft_data, *FLAGS, *flags, trainer_fault=fault, ranks=ranks
        )
        made.append(Live(started))
        return made[-1]

    yield run
    for live in made:
        live.run.kill()


@pytest.fixture(scope="module")
def straight_on_two(model: Path, sft_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that nobody stops."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run = shared_commands().sft(output, model, sft_data, *FLAGS, "--ckpt", ranks=2).succeed()
    assert run.log.count("loading model") == 1, "the first rank shows the phases of all"
    return output


@pytest.mark.ranks
@pytest.mark.parametrize("whom", ["the command", "one rank"])
def test_a_signal_saves_the_current_step_on_all_ranks_and_a_resume_goes_on_bit_for_bit(
    whom: str, start: Start, straight_on_two: Path, model: Path, sft_data: Path, ends: Ends, tmp_path: Path
) -> None:
    """One rank gets it from a scheduler that signals every process of a job by itself. That rank waits in a collective
    for rank 0, which is held, and takes the signal when the collective is over. What goes on is a new Python, with
    another order of sets than the forks before."""
    live = start("--ckpt", fault=held_after(8, until=exists(tmp_path / "signalled")), ranks=2)
    live.wait_for("step  8/")
    processes = [*live.ranks(), live.ranks()[0].parent()]
    sockets = [one for process in processes if process for one in process.net_connections("tcp")]
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}, "other machines reach the ranks of one node"
    number = signal.SIGTERM if whom == "the command" else signal.SIGUSR1
    os.kill(live.run.pid if whom == "the command" else live.ranks()[1].pid, number)
    if whom == "the command":
        wait_until(lambda: "SIGTERM: saving the current step" in live.run.log, "the signal")
    (tmp_path / "signalled").touch()
    assert live.ended(ends) == 128 + number
    (step,) = live.run_dir.committed_steps()
    assert 8 <= step < STEPS and manifest.verify(live.run_dir.checkpoint(step)).world_size == 2
    assert f"stopped at step {step} of {STEPS}, which is saved" in live.run.log and "NOT saved" not in live.run.log
    if whom == "the command":
        flags = (*FLAGS, "--parallel.num-ranks", "2", "--ckpt.resume-step", "latest")
        resumed = run_sft(live.run.output, model, sft_data, *flags, starts_python=True)
        assert resumed.code == 0 and f"resuming from step {step}" in resumed.output, resumed.output
        assert differing(end_state(live.run.output, last=STEPS), end_state(straight_on_two, last=STEPS)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_during_the_imports_ends_before_the_first_step(
    number: signal.Signals, tmp_path: Path, model: Path, sft_data: Path, ends: Ends
) -> None:
    with LiveSft(tmp_path / "run", model, sft_data, *(["--ckpt"] if number == signal.SIGUSR1 else [])) as run:
        run.wait_for("importing torch")
        os.killpg(run.process.pid, number)
        assert run.wait(within_s=HANG_S) == 128 + number
        assert run.descendants and all(ends(pid) for pid in run.descendants)
        assert "Traceback" not in run.output and run.run_dir.committed_steps() == []
        if number == signal.SIGUSR1:
            assert "stopped at step 0" in run.output and "before anything was trained" in run.output


def test_a_grace_that_is_too_short_is_told_by_the_exit_code(start: Start) -> None:
    """The save never ends."""
    live = start("--ckpt", "--ckpt.grace-s", "0.1", fault=held_commit(5) + held_after(5, until=ASKED_TO_STOP))
    live.wait_for("step  5/")
    os.kill(live.run.pid, signal.SIGTERM)
    assert live.run.wait(HANG_S).code == NOT_SAVED
    assert "was NOT saved" in live.run.log and "there is no checkpoint" in live.run.log
    assert live.run_dir.committed_steps() == []


def test_ctrl_c_waits_for_the_step_whatever_the_grace(start: Start, ends: Ends, tmp_path: Path) -> None:
    """SIGTERM could not save: the grace is over before the step is."""
    live = start("--ckpt", "--ckpt.grace-s", "0.001", fault=held_after(5, until=exists(tmp_path / "signalled")))
    live.wait_for("step  5/")
    os.kill(live.run.pid, signal.SIGINT)
    live.wait_for("SIGINT: the current step ends and is saved (a step takes about")
    (tmp_path / "signalled").touch()
    assert live.ended(ends) == 128 + signal.SIGINT and "took 0 s, longer than ckpt.grace_s = 0.001 s" in live.run.log
    assert live.run_dir.committed_steps() and "which is saved" in live.run.log, live.run.log


@pytest.mark.clock
@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, "most 600 s"), (signal.SIGINT, "go on from step 0")])
def test_a_second_signal_does_not_wait_for_the_grace(number: int, said: str, start: Start, ends: Ends) -> None:
    live = start("--ckpt", "--ckpt.grace-s", "600", fault=held_after(8, until=NEVER))
    live.wait_for("step  2/")
    (rank,) = live.ranks()
    rank.suspend()  # so the save never comes
    os.kill(live.run.pid, number)
    live.wait_for(said)
    time.sleep(ECHO_S)  # sooner it would be the same signal
    os.kill(live.run.pid, number)
    assert live.ended(ends) == NOT_SAVED and "was NOT saved" in live.run.log


@pytest.mark.ranks
def test_a_rank_that_is_killed_during_a_save_ends_the_run_which_goes_on_bit_for_bit(
    start: Start, straight_on_two: Path, ends: Ends
) -> None:
    live = start("--ckpt.interval", "4", fault=held_commit(8), ranks=2)
    wait_until(lambda: any(live.run_dir.checkpoints.glob(".tmp-step_8/trainer/*")) or live.run.has_ended, "the save")
    live.wait_for("step  8/")
    live.ranks()[1].kill()
    assert live.ended(ends) == 1
    assert "killed by signal 9" in live.run.log and "log: " in live.run.log and "finished step" not in live.run.log
    assert live.run_dir.committed_steps() == [4]
    resumed = start("--ckpt.interval", "4", "--ckpt.resume-step", "latest", ranks=2).run.wait()
    assert resumed.code == 0 and "resuming from step 4" in resumed.log, resumed.log
    assert differing(end_state(resumed.output, last=STEPS), end_state(straight_on_two, last=STEPS)) == []


def test_a_trainer_that_is_told_to_stop_by_others_has_not_finished(start: Start, ends: Ends) -> None:
    live = start(fault=held_after(8, until=NEVER))
    live.wait_for("step  1/")
    (trainer,) = psutil.Process(live.run.pid).children()
    trainer.terminate()
    assert live.ended(ends) == 1
    assert "finished step" not in live.run.log and "error: trainer" in live.run.log


def test_a_trainer_that_waits_for_a_batch_saves_at_once(tiny_model: ModelFactory, tmp_path: Path) -> None:
    """No orchestrator runs: the third batch never comes."""
    run_dir = RunDir(tmp_path / "run")
    flags = (
        "--output-dir", str(run_dir.path), "--model.name", str(tiny_model()), "--max-steps", "10",
        "--parallel.threads", "1", "--ckpt", "--mismatch-limit", "inf",
    )  # fmt: skip
    live = Live(shared_commands().start("trainer", run_dir.path, list(flags)))
    live.wait_for("waiting for batches")
    publish_journal(run_dir, (1, 2))
    live.wait_for("step  2/")
    os.kill(live.run.pid, signal.SIGTERM)
    assert live.run.wait(HANG_S).code == 128 + signal.SIGTERM, live.run.log
    assert "stopped at step 2 of 10, which is saved" in live.run.log and run_dir.committed_steps() == [2]
    manifest.verify(run_dir.checkpoint(2))
    assert (run_dir.checkpoint(2) / "orchestrator" / "orchestrator.json").read_bytes() == (
        run_dir.batch(2) / STATE_NAME
    ).read_bytes()
    assert (run_dir.weights_of(2) / "model.safetensors").exists()
