"""Resuming after every step, and on other numbers of ranks: the same run, and every sample once per epoch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.shared.files import manifest
from holdfast.trainer.data.samples import SampleOrder
from tests.runs.training import Runs, run_sft

pytestmark = pytest.mark.slow

Models = Callable[..., Path]

NUM_SAMPLES = 60
BATCH_SIZE = 8
TWO_EPOCHS = 15


def test_a_process_for_every_step_gives_the_run_of_one(
    sft_runs: Runs, tiny_model: Models, sft_data: Path, tmp_path: Path
) -> None:
    """Steps 6 to 10, one start each, after a run of five; with dropout, packing, accumulation and shuffling."""
    straight = sft_runs.succeeded("straight")
    run = sft_runs.succeeded("half")
    shutil.copytree(run.run_dir.path, tmp_path / "run")
    model = tiny_model(weights=False, attention_dropout=0.3)
    exact = ("--data.validation-fraction", "0.1", "--val-interval", "3")
    for step in range(6, 11):
        run = run_sft(
            tmp_path / "run", model, sft_data, *exact, "--ckpt.resume-step", "latest", "--max-steps", str(step)
        )
        assert run.code == 0 and f"resuming from step {step - 1}" in run.output, run.output
        assert run.run_dir.committed_steps()[-1] == step
    assert run.weights(10) == straight.weights(10)
    for name in ("step", "loss", "grad_norm", "samples", "tokens"):
        assert run.column(name) == straight.column(name) and len(run.column(name)) == 10, name


def test_two_one_and_two_ranks_train_every_sample_once_per_epoch(
    sft_runs: Runs, tiny_model: Models, sft_data: Path, tmp_path: Path
) -> None:
    run = sft_runs.succeeded("two_straight")
    shutil.copytree(run.run_dir.path, tmp_path / "run")
    model = tiny_model(weights=False, attention_dropout=0.3)
    for ranks, start, last in ((1, 10, 12), (2, 12, TWO_EPOCHS)):
        flags = ("--parallel.num-ranks", str(ranks), "--max-steps", str(last), "--ckpt.resume-step", "latest")
        run = run_sft(tmp_path / "run", model, sft_data, *flags)
        assert run.code == 0 and f"resuming from step {start}" in run.output, run.output
        assert manifest.read_manifest(run.run_dir.checkpoint(last)).world_size == ranks
    positions = [int(samples) for samples in run.column("samples")]
    assert positions == list(range(BATCH_SIZE, 2 * NUM_SAMPLES + 1, BATCH_SIZE))
    order = SampleOrder(NUM_SAMPLES, seed=3, shuffle=True)
    trained = [index for end in positions for index in order.batch(end - BATCH_SIZE, BATCH_SIZE)]
    first, second = trained[:NUM_SAMPLES], trained[NUM_SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES)) and first != second
