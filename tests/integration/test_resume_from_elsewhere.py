"""`sft`, the real command, on what another run left: forks go on exactly, warm starts take the weights alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.shared.config.schedule import learning_rate
from holdfast.shared.config.trainer import OptimConfig
from holdfast.shared.files import manifest
from tests.conftest import ModelFactory
from tests.runs.training import Runs, SftRun, run_sft

PEAK = 1e-3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory, sft_data: Path) -> Runs:
    """Runs by name; all but the first begin with what that one left."""
    home = tmp_path_factory.mktemp("elsewhere")
    model = tiny_model(weights=False, attention_dropout=0.3)
    schedule = ("--optim.schedule", "cosine", "--optim.warmup-steps", "1")
    other = home / "other"
    runs = Runs()

    def straight() -> SftRun:
        return run_sft(other, model, sft_data, *schedule, "--max-steps", "6", "--ckpt.interval", "3")

    def define(name: str, *flags: str) -> None:
        def make() -> SftRun:
            runs.succeeded("straight")
            return run_sft(home / name, model, sft_data, *flags)

        runs.define(name, make)

    def from_bin() -> SftRun:
        weights = runs.succeeded("straight").run_dir.weights_of(6)
        (home / "bin").mkdir()
        torch.save(load_file(weights / "model.safetensors"), home / "bin" / "pytorch_model.bin")
        shutil.copy(weights / "config.json", home / "bin")
        return run_sft(home / "warm_bin", model, sft_data, *warm, str(home / "bin"))

    fork = ("--ckpt.resume-dir", str(other / "checkpoints" / "step_3"), *schedule)
    last = str(other / "checkpoints" / "step_6")
    published = str(other / "weights" / "step_6")
    warm = ("--max-steps", "2", "--ckpt.weights-only")
    two = ("--max-steps", "1", "--optim.lr", "1e-30", "--parallel.num-ranks", "2", "--ckpt.weights-only")
    runs.define("straight", straight)
    define("forked", *fork, "--max-steps", "6")
    define("stretched", *fork, "--max-steps", "9")
    define("fixed_end", *fork, "--max-steps", "9", "--optim.schedule-steps", "6")
    define("by_name", "--model.name", published, "--model.init", "pretrained", "--max-steps", "2")
    define("warm_checkpoint", *warm, last)
    define("warm_weights", *warm, published)
    runs.define("warm_bin", from_bin)
    define("warm_on_two", *two, published)
    define("warm_on_two_from_shards", *two, last)
    return runs


def test_a_fork_goes_on_as_the_other_run_did_bit_for_bit(runs: Runs) -> None:
    straight, forked = runs.succeeded("straight"), runs.succeeded("forked")
    assert f"forked {straight.run_dir.checkpoint(3)}" in forked.output and "resuming from step 3" in forked.output
    assert forked.column("step") == [4, 5, 6]
    for name in ("loss", "grad_norm", "lr", "samples", "tokens"):
        assert forked.column(name) == straight.column(name)[3:] and len(set(forked.column(name))) == 3, name
    assert forked.weights(6) == straight.weights(6)


def test_a_fork_has_the_checkpoint_for_itself_and_says_where_it_is_from(runs: Runs) -> None:
    straight, forked = runs.succeeded("straight"), runs.succeeded("forked")
    source = straight.run_dir.checkpoint(3)
    identity = json.loads((forked.run_dir.path / "run.json").read_text())
    assert identity["forked_from"] == {"run_id": straight.run_dir.run_id(), "step": 3, "path": str(source)}
    assert identity["run_id"] != straight.run_dir.run_id()
    assert manifest.verify(forked.run_dir.checkpoint(3)) == manifest.verify(source)
    assert straight.run_dir.committed_steps() == [3, 6]


def test_more_steps_stretch_the_schedule_and_the_command_says_so(runs: Runs) -> None:
    run = runs.succeeded("stretched")
    cosine = OptimConfig(lr=PEAK, schedule="cosine", warmup_steps=1)
    assert run.column("lr") == pytest.approx([learning_rate(step, cosine, 9) for step in range(4, 10)], rel=1e-7)
    assert "the cosine schedule now ends at step 9 instead of 6: the learning rate of step 4 is" in run.output
    assert "max_steps: 6 -> 9" in run.output


def test_a_schedule_with_its_own_end_goes_on_as_it_was(runs: Runs) -> None:
    straight, run = runs.succeeded("straight"), runs.succeeded("fixed_end")
    rates = straight.column("lr")
    assert run.column("lr") == [*rates[3:], *rates[-1:] * 3] and rates[-1] > 0
    assert run.column("loss")[:3] == straight.column("loss")[3:]
    assert run.weights(9) != straight.weights(6), "every step trains"
    assert "schedule now ends" not in run.output


@pytest.mark.parametrize("name", ["warm_checkpoint", "warm_weights", "warm_bin"])
def test_a_warm_start_takes_the_weights_and_nothing_else(runs: Runs, name: str) -> None:
    """It is the run that loads the published weights by the name of the model, from its first step on."""
    by_name, warm = runs.succeeded("by_name"), runs.succeeded(name)
    assert "resuming" not in warm.output
    assert warm.column("step") == [1, 2] and warm.column("samples") == [8, 16]
    assert warm.column("loss") == by_name.column("loss")
    assert warm.weights(2) == by_name.weights(2)
    assert "forked_from" not in (warm.run_dir.path / "run.json").read_text()


@pytest.mark.parametrize("name", ["warm_on_two", "warm_on_two_from_shards"])
@pytest.mark.slow
def test_two_ranks_each_read_their_own_part(runs: Runs, name: str) -> None:
    """At this learning rate a step moves nothing, so the run publishes what it loaded."""
    straight, two = runs.succeeded("straight"), runs.succeeded(name)
    loaded, expected = (
        load_file(run.run_dir.weights_of(step) / "model.safetensors") for run, step in ((two, 1), (straight, 6))
    )
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=1e-25)
