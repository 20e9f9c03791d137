"""Early stopping: a run ends when its metric does not improve, at the same step and with the same bits after kills."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.forking.commands import Run, shared_commands, wait_for
from tests.integration.test_sft_evaluated import ASKS
from tests.runs.processes import HANG_S, WITH_STUB_ENGINE

pytestmark = pytest.mark.launch

TRAINS = (
    "--model.name", str(ROOT / "examples" / "reverse_text" / "model"), "--data.batch-size", "8",
    "--data.name", str(ROOT / "examples" / "reverse_text" / "sft.jsonl"), "--data.micro-batch-size", "4",
    "--data.seq-len", "64", "--max-steps", "40", "--ckpt.interval", "2", "--parallel.threads", "1",
    "--optim.lr", "1e-3", "--optim.schedule", "constant", "--stop.patience", "5",
)  # fmt: skip


def started(directory: Path, *flags: str, log: str = "first") -> Run:
    path = directory.with_name(f"{directory.name}_{log}.out")
    argv = ["--output-dir", str(directory), *TRAINS, *flags]
    return shared_commands().start("sft", directory, argv, log=path, environment={**os.environ})


def steps_of(run_dir: RunDir) -> list[int]:
    return [json.loads(line)["step"] for line in run_dir.metrics.read_text().splitlines()]


def test_a_run_ends_early_at_the_same_step_after_kills(tmp_path: Path, ends: Callable[..., bool]) -> None:
    never = ("--stop.metric", "min:samples")
    whole, killed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "killed")
    done = started(whole.path, *never).succeed(HANG_S)
    assert "early end: samples has not been better than 8 for 5 values" in done.log
    assert "finished step 6 of 40; weights: " in done.log and "and a larger --stop.patience" in done.log
    assert steps_of(whole) == [1, 2, 3, 4, 5, 6] and whole.committed_steps()[-1] == 6, "not a multiple of the interval"
    assert whole.published_weights() == [6] and whole.early_end() == 6
    refused = started(whole.path, *never, log="again")
    assert refused.wait(HANG_S).code == 2 and "raise --stop.patience and add --ckpt.resume-step latest" in refused.log
    # Killed in the middle: what came before counts.
    run = started(killed.path, *never)
    wait_for(lambda: killed.metrics.exists() and len(steps_of(killed)) >= 3, "three steps", run)
    run.kill()
    assert ends(run.pid), run.log
    started(killed.path, *never, log="second").succeed(HANG_S)
    # Killed after the decision, before anybody wrote down that the run has ended: it ends again, and trains nothing.
    for events in killed.path.glob("logs/attempt_*/events.jsonl"):
        lines = events.read_text().splitlines(keepends=True)
        events.write_text("".join(line for line in lines if '"exit_code"' not in line))
    again = started(killed.path, *never, log="third").succeed(HANG_S)
    assert "finished step 6 of 40" in again.log and steps_of(killed) == [1, 2, 3, 4, 5, 6]
    for name in ("weights/step_6/model.safetensors", "checkpoints/step_6/manifest.json"):
        assert (killed.path / name).exists()
    weights = [one.weights_of(6) / "model.safetensors" for one in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # Continued with more patience, it comes further.
    started(whole.path, *never, "--stop.patience", "7", "--ckpt.resume-step", "latest", log="more").succeed(HANG_S)
    assert steps_of(whole) == list(range(1, 9)) and whole.early_end() == 8


def test_a_metric_that_nobody_measures_is_refused(tmp_path: Path) -> None:
    refused = started(tmp_path / "run", "--stop.metric", "val/loss")
    assert refused.wait(HANG_S).code == 2
    assert "stop.metric = 'val/loss' needs val_interval, and data.validation_fraction above 0" in refused.log


def test_the_step_at_which_a_run_ends_early_is_evaluated(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    argv = ["--output-dir", str(run_dir.path), *TRAINS, "--stop.metric", "min:samples", *ASKS, "--ckpt.keep", "1"]
    environment = {**os.environ, **WITH_STUB_ENGINE}
    run = shared_commands().start("sft", run_dir.path, argv, log=tmp_path / "run.out", environment=environment)
    run.succeed(2 * HANG_S)
    assert [step for step in range(41) if run_dir.is_evaluated(step)] == [0, 4, 6] and run_dir.early_end() == 6
