"""`--slurm` on a real SLURM of two nodes: preempted and queued again, a run is that of one machine, bit for bit."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.forking.commands import shared_commands
from tests.runs.processes import HANG_S
from tests.runs.rl import CONFIG, SMALL_BATCH, assert_same, last_step, outcome, succeeded
from tests.runs.slurm_nodes import SlurmNodes, install
from tests.runs.training import sft_command

pytestmark = [pytest.mark.slurm, pytest.mark.launch, pytest.mark.engine, pytest.mark.timeout(900)]
STEPS = 30
TIMEOUT_S = 400.0
FLAGS = (
    *SMALL_BATCH,
    *("--max-steps", str(STEPS), "--ckpt.interval", "5"),
    *("--trainer.parallel.threads", "1", "--inference.engine.threads", "1"),
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNodes]:
    install()
    with SlurmNodes(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def test_a_job_that_is_preempted_goes_on_when_it_is_started_again(slurm: SlurmNodes, tmp_path: Path) -> None:
    local = succeeded(
        tmp_path / "local", *FLAGS, "--trainer.parallel.num-ranks", "2", timeout_s=TIMEOUT_S, engine="vllm"
    )
    run_dir = RunDir(tmp_path / "run")
    rl = [str(Path(sys.executable).with_name("rl")), "@", CONFIG, "--output-dir", str(run_dir.path), *FLAGS]
    job = slurm.submit([*rl, "--slurm.nodes", "2", "--slurm.time", "1:00:00", "--trainer.parallel.nodes", "2"])
    job.wait_for("step 7", lambda: last_step(run_dir) >= 7)
    job.preempt()
    said, before = job.said, last_step(run_dir)
    assert "SIGTERM: saving the current step" in said and f"stopped at step {before} of {STEPS}, which" in said
    assert 7 <= before < STEPS
    job.start_again()
    job.wait()
    assert f"finished step {STEPS} of {STEPS}" in job.said and f"resuming from step {before}" in job.said
    assert_same(outcome(run_dir, STEPS), outcome(local.run_dir, STEPS))


def test_the_commands_of_two_nodes_are_stopped_and_started_again_together(
    slurm: SlurmNodes, tmp_path: Path, tiny_model: Callable[..., Path], sft_data: Path
) -> None:
    """Ahead of the time limit, then preempted; in a directory whose name a shell and SLURM would read otherwise."""
    steps, model = 200, tiny_model(dropout=0.1)
    flags = ("--max-steps", str(steps), "--ckpt.interval", "50")
    local = shared_commands().sft(tmp_path / "local", model, sft_data, *flags, ranks=2)
    run_dir = RunDir(tmp_path / 'a run\'s "100%j" é')
    sft = sft_command(run_dir.path, model, sft_data, *flags, "--parallel.num-ranks", "1")
    assert local.wait(HANG_S).code == 0, local.log
    job = slurm.submit([*sft, "--slurm.nodes", "2", "--slurm.time", "1:00:00"])
    for disturb, name, first in ((job.reach_limit, "SIGUSR1", 20), (job.preempt, "SIGTERM", 60)):
        job.wait_for(f"step {first}", lambda first=first: last_step(run_dir) >= first)
        disturb()
        stopped = last_step(run_dir)
        assert first <= stopped < steps and run_dir.committed_steps()[-1] == stopped
        assert f"{name}: saving the current step" in job.said
        assert job.said.count(f"stopped at step {stopped} of {steps}, which is saved") == 1
        job.start_again()
        job.wait_for(f"step {stopped} again", lambda stopped=stopped: f"resuming from step {stopped}" in job.said)
    job.wait()
    weights = [(one.weights_of(steps) / "model.safetensors").read_bytes() for one in (RunDir(local.output), run_dir)]
    assert weights[0] == weights[1] and last_step(run_dir) == steps
