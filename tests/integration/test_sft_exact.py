"""`sft`, the real command: a resumed run is the uninterrupted run, and however a step is split it is the same."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.shared.config import SftConfig
from holdfast.shared.config.load import read_toml
from holdfast.shared.files import manifest
from tests.runs.training import Runs, sft_command

RELATIVE = 1e-5


def test_ten_steps_are_five_and_five_more_bit_for_bit(sft_runs: Runs) -> None:
    """With dropout, shuffling, packing, accumulation and validation on; the straight run never saves."""
    straight, resumed = sft_runs.succeeded("straight"), sft_runs.succeeded("resumed")
    assert straight.weights(10) == resumed.weights(10)
    for name in ("loss", "grad_norm", "lr", "samples", "tokens"):
        assert straight.column(name) == resumed.column(name) != [], name
    assert straight.column("step") == resumed.column("step") == list(range(1, 11))
    # The first half validated once more, after its own final step.
    validated = resumed.column("val/loss")
    assert straight.column("val/loss") == [validated[0], *validated[2:]] and len(validated) == 5
    assert len(set(straight.column("loss"))) == 10
    assert "resuming from step 5" in resumed.output and "finished step 10 of 10" in resumed.output


def test_the_dropout_of_the_exact_run_matters(sft_runs: Runs) -> None:
    """Otherwise the test above could not notice a generator that is not restored."""
    straight, without = sft_runs.succeeded("straight"), sft_runs.succeeded("packed")
    assert straight.column("loss")[0] != pytest.approx(without.column("loss")[0], rel=RELATIVE)


def test_without_ckpt_nothing_is_saved_and_with_it_the_final_step(sft_runs: Runs) -> None:
    straight, resumed = sft_runs.succeeded("straight"), sft_runs.succeeded("resumed")
    assert straight.run_dir.committed_steps() == []
    assert resumed.run_dir.committed_steps() == [5, 10]
    for step in (5, 10):
        assert manifest.verify(resumed.run_dir.checkpoint(step)).step == step
    assert resumed.run_dir.clear_leftovers() == []


def test_the_run_ends_with_weights_that_transformers_loads(sft_runs: Runs) -> None:
    run = sft_runs.succeeded("straight")
    directory = run.run_dir.weights_of(10)
    assert run.run_dir.published_weights() == [10] and str(directory) in run.output
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("abc>")["input_ids"]])).logits
    assert logits.shape == (1, 4, 128) and torch.isfinite(logits).all()


def test_every_attempt_leaves_its_config_and_logs(sft_runs: Runs) -> None:
    run_dir = sft_runs.succeeded("resumed").run_dir
    first, second = (read_toml(SftConfig, run_dir.configs(attempt) / "sft.toml") for attempt in (1, 2))
    assert (first.max_steps, second.max_steps) == (5, 10)
    assert second.ckpt is not None and second.ckpt.resume_step == 5
    assert "importing torch" in (run_dir.logs(2) / "events.jsonl").read_text()
    assert (run_dir.logs(1) / "trainer.log").stat().st_size > 0
    assert not run_dir.discarded(2).exists(), "the weights of the step itself are published again, nothing else moves"


def test_packed_equals_unpacked_and_one_by_eight_equals_eight_by_one(sft_runs: Runs) -> None:
    packed = sft_runs.succeeded("packed")
    assert packed.column("loss")[-1] < packed.column("loss")[0]
    for name in ("one_by_one", "eight_at_once"):
        other = sft_runs.succeeded(name)
        assert other.column("loss") == pytest.approx(packed.column("loss"), rel=RELATIVE), name
        assert other.column("grad_norm") == pytest.approx(packed.column("grad_norm"), rel=1e-4), name
        assert other.column("tokens") == packed.column("tokens")


def test_a_directory_with_a_run_is_refused_and_stays_as_it_is(
    sft_runs: Runs, tiny_model: Callable[..., Path], sft_data: Path
) -> None:
    run_dir = sft_runs.succeeded("resumed").run_dir
    before = sorted(run_dir.path.rglob("*"))
    command = sft_command(run_dir.path, tiny_model(weights=False), sft_data)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert "--ckpt.resume-step latest (step 10)" in done.stderr and "--clean" in done.stderr
    assert sorted(run_dir.path.rglob("*")) == before
    done = subprocess.run([*command, "--ckpt.resume-step", "7"], capture_output=True, text=True)
    assert done.returncode == 2 and "committed steps: 5, 10" in done.stderr
    assert sorted(run_dir.path.rglob("*")) == before


def test_numbers_that_break_stop_the_run_and_nothing_of_the_step_is_kept(sft_runs: Runs) -> None:
    run = sft_runs["broken_numbers"]
    assert run.code == 3
    assert "error: trainer: step 2: loss is" in run.output and "optim.lr" in run.output
    assert "Traceback" not in run.output
    assert run.run_dir.committed_steps() == [1] and run.column("step") == [1]
    assert run.run_dir.published_weights() == []


def test_a_sample_that_is_too_long_ends_the_run_with_its_place(sft_runs: Runs, sft_data: Path) -> None:
    run = sft_runs["too_long"]
    assert run.code == 2
    assert f"{sft_data}, row " in run.output and "data.seq_len is 6" in run.output
    assert "Traceback" not in run.output and "log: " in run.output
