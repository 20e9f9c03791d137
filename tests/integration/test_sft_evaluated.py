"""`sft` that is evaluated while it trains: each due step once, whatever is killed, and the weights of a plain run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.evaluation.results import ROLLOUTS_NAME
from holdfast.orchestrator.evaluation.statistics import summary_in
from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.forking.commands import Run, shared_commands, wait_for
from tests.runs.processes import HANG_S, WITH_STUB_ENGINE
from tests.runs.trackers import TrackedDirectory

pytestmark = pytest.mark.launch

MODEL = ROOT / "examples" / "reverse_text" / "model"
DATA = ROOT / "examples" / "reverse_text" / "sft.jsonl"
TRAINS = (
    "--model.name", str(MODEL), "--data.name", str(DATA), "--data.batch-size", "8", "--data.micro-batch-size", "4",
    "--data.seq-len", "64", "--max-steps", "8", "--ckpt.interval", "2", "--ckpt.keep", "1", "--parallel.threads", "1",
    "--optim.lr", "1e-3",
)  # fmt: skip
ASKS = (
    "--eval.interval", "4", "--eval.num-tasks", "6", "--eval.samples-per-task", "2", "--eval.seq-len", "64",
    "--eval.sampling.max-tokens", "16", "--eval.environments", '[{"id": "reverse_text"}]',
)  # fmt: skip
TRACKED = ("--tracking.finish-timeout-s", "600")  # on a busy machine the imports of a tracker take long


def started(directory: Path, *flags: str, log: str = "first") -> Run:
    argv = ["--output-dir", str(directory), *TRAINS, *flags]
    path = directory.with_name(f"{directory.name}_{log}.out")
    return shared_commands().start("sft", directory, argv, log=path, environment={**os.environ, **WITH_STUB_ENGINE})


def test_every_due_step_is_evaluated_once_and_training_is_as_without(tmp_path: Path, ends: Callable[..., bool]) -> None:
    run_dir = RunDir(tmp_path / "run")
    run = started(run_dir.path, *ASKS, *TRACKED)
    # The command dies while the first step is evaluated, and takes everything along.
    wait_for(lambda: run_dir.evaluation(0).exists(), "the first evaluation", run)
    run.kill()
    assert ends(run.pid), run.log
    again = started(run_dir.path, *ASKS, *TRACKED, "--ckpt.resume-step", "auto", log="second").succeed(2 * HANG_S)
    ((_, sent),) = TrackedDirectory.of(run_dir).steps("tensorboard", "eval/version").items()
    assert sent == [(0, 0.0), (4, 4.0), (8, 8.0)]
    assert [step for step in range(9) if run_dir.is_evaluated(step)] == [0, 4, 8]
    for step in (0, 4, 8):
        assert again.log.count(f"evaluated: step {step}, ") == 1, again.log
        assert summary_in(run_dir.evaluation(step)).environments["reverse_text"].num_tasks == 6
        served = run_dir.evaluation(step) / "config" / "inference.toml"
        assert "threads" not in served.read_text(), "the trainer needs cores as well"
        assert not list(run_dir.evaluation(step).glob("model_step_*")), "what was exported for it is gone"
    lines = {step: (run_dir.evaluation(step) / ROLLOUTS_NAME).read_bytes() for step in (0, 4, 8)}
    assert all(content.count(b"\n") == 12 for content in lines.values())
    assert len({str(summary_in(run_dir.evaluation(step)).policy["digest"]) for step in (0, 4, 8)}) == 3
    plain = RunDir(tmp_path / "plain")
    assert started(plain.path).wait().code == 0
    weights = [one.weights_of(8) / "model.safetensors" for one in (run_dir, plain)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # Step 8 is there and evaluated: nothing is left to do.
    third = started(run_dir.path, *ASKS, "--ckpt.resume-step", "latest", log="third").wait(2 * HANG_S)
    assert third.code == 0 and "evaluated: step" not in third.log, third.log
    assert {step: (run_dir.evaluation(step) / ROLLOUTS_NAME).read_bytes() for step in (0, 4, 8)} == lines


def test_an_evaluation_that_fails_ends_no_training(tmp_path: Path) -> None:
    environments = '[{"id": "tests.runs.faulty_environment:Faulty", "args": {"load": "refused"}}]'
    run_dir = RunDir(tmp_path / "run")
    run = started(run_dir.path, *ASKS[:-2], "--eval.environments", environments).wait(2 * HANG_S)
    assert run.code == 0 and "finished step 8 of 8" in run.log, run.log
    assert "WARNING: the run continues without evaluation" in run.log and "it is not to be" in run.log
    assert not run_dir.is_evaluated(0)
    assert run_dir.given_up.exists() and run_dir.committed_steps()[-1] == 8
