"""What programs do in some steps: they learn, however a step is divided it is the same, and broken numbers end them."""

import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.errors import CheckpointError, DataError, TrainingError
from holdfast.run import manifest
from holdfast.run.run_dir import REFERENCE_NAME, RunDir
from holdfast.trainer.model import attention
from tests.faults.run_states import differing
from tests.runs.rl import EVERYTHING
from tests.unit.trainer.programs.cases import Programs
from tests.unit.trainer.programs.in_process import HALF, STEPS, column, end_state, train


def test_packed_equals_unpacked_and_one_by_eight_equals_eight_by_one(programs: Programs, tmp_path: Path) -> None:
    settings = programs.settings("sft", dropout=False)
    packed = train("sft", tmp_path / "packed", settings, until=4)
    assert column(packed, "loss")[-1] < column(packed, "loss")[0]
    for size in (1, 8):
        data = settings["data"] | {"pack": False, "micro_batch_size": size}
        other = train("sft", tmp_path / f"of {size}", settings | {"data": data}, until=4)
        assert column(other, "loss") == pytest.approx(column(packed, "loss"), rel=1e-5)
        assert column(other, "grad_norm") == pytest.approx(column(packed, "grad_norm"), rel=1e-4)
        assert column(other, "tokens") == column(packed, "tokens")


def test_numbers_that_break_stop_the_run_and_nothing_of_the_step_is_kept(programs: Programs, tmp_path: Path) -> None:
    broken = programs.settings("sft") | {"optim": {"lr": 1e30}, "ckpt": {"interval": 1}}
    with pytest.raises(TrainingError, match=r"step 2: loss is (.|\n)*optim\.lr"):
        train("sft", tmp_path / "run", broken, until=4)
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.committed_steps() == [1] and column(run_dir, "step") == [1]
    assert run_dir.published_weights() == []


@pytest.mark.parametrize(("name", "shares"), [("rl", True), ("dpo", True), ("dpo, kto", False)])
def test_a_prompt_that_answers_would_see_in_part_ends_the_start(
    name: str, shares: bool, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they share it, which answers of `kto` do not."""
    plain = attention._seen
    without_first = lambda *sizes: plain(*sizes) & (torch.arange(sizes[1]) > 0)  # noqa: E731
    monkeypatch.setattr(attention, "_seen", without_first)
    refused = pytest.raises(DataError, match="answers that share the tokens of their prompt are")
    with refused if shares else nullcontext():
        train(name.split(",")[0], tmp_path / "run", programs.settings(name), until=1)
    assert column(RunDir(tmp_path / "run"), "step") == ([] if shares else [1])


@pytest.mark.parametrize("name", ["sft", "dpo", "reward-model", "rl"])
def test_divergence_warns_once(name: str, programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_dir = train(name, tmp_path / "run", programs.settings(name) | {"optim": {"lr": 1e3}}, until=7)
    norms = column(run_dir, "grad_norm")
    assert caplog.text.count("training diverges") == any(norm > 1000 * norms[0] for norm in norms)
    assert norms[-3:] == [0, 0, 0] and caplog.text.count("nothing is learned any more") == 1
    said = [message.split(": ", 1)[1] for message in caplog.messages if message.startswith("WARNING at step ")]
    assert said.count("the gradient is exactly 0 for 3 steps") == 1


def test_a_critic_whose_loss_breaks_ends_the_step_unpublished_and_unsaved(programs: Programs, tmp_path: Path) -> None:
    broken = programs.settings("rl, everything") | {"critic": EVERYTHING["critic"] | {"optim": {"lr": 1e30}}}
    with pytest.raises(TrainingError, match=r"the critic's loss is (.|\n)*critic\.optim\.lr"):
        train("rl", tmp_path / "run", broken, until=4)
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.published_weights() == [0] and run_dir.committed_steps() == []
    assert not run_dir.metrics.read_text()


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_best_checkpoint_stays_besides_the_newest(name: str, programs: Programs, tmp_path: Path) -> None:
    kept = {"val_interval": 1, "ckpt": {"interval": 1, "keep": 1, "keep_best": "max:val/loss"}}
    run_dir = train(name, tmp_path / "run", programs.settings(name) | kept, until=4)
    losses = column(run_dir, "val/loss")
    best = 1 + losses.index(max(losses))
    assert len(losses) == 4 and best < 4, losses
    assert run_dir.committed_steps() == [best, 4]


def test_without_keep_all_steps_stay(programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kept = {"val_interval": 1, "ckpt": {"interval": 1, "keep_interval": 2, "keep_best": "val/los"}}
    run_dir = train("reward-model", tmp_path / "run", programs.settings("reward-model") | kept, until=3)
    assert run_dir.committed_steps() == [1, 2, 3] and caplog.text.count("has no metric") == 1
    assert "step 1 has no metric 'val/los' (ckpt.keep_best)" in caplog.text


def test_a_metric_that_no_step_has_is_named_at_the_first_step(
    programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    named = {"ckpt": {"interval": 3, "keep_best": "los"}, "stop": {"metric": "max:rewards/accuracy"}}
    train("reward-model", tmp_path / "run", programs.settings("reward-model") | named, until=3)
    assert "step 1 has no metric 'los' (ckpt.keep_best) to be the best by. Did you mean 'loss'?" in caplog.text
    assert "step 1 has no metric 'rewards/accuracy' (stop.metric) to end the run by. Did you mean" in caplog.text
    assert caplog.text.count("has no metric") == 2


def test_the_reference_is_in_every_checkpoint_and_that_of_the_start(programs: Programs, tmp_path: Path) -> None:
    run_dir = train("dpo", tmp_path / "run", programs.settings("dpo") | {"ckpt": {"interval": 1}}, until=3)
    written = set()
    for step in (1, 2, 3):
        directory = run_dir.checkpoint(step)
        assert f"trainer/{REFERENCE_NAME}" in manifest.verify(directory).files
        written.add((directory / "trainer" / REFERENCE_NAME).read_bytes())
    assert written == {(run_dir.path / REFERENCE_NAME).read_bytes()}
    with np.load(run_dir.path / REFERENCE_NAME) as arrays:
        assert arrays["logprobs"].shape == (48, 2)
    run_dir.remove_run()
    assert not (run_dir.path / REFERENCE_NAME).exists(), "--clean leaves it to no other run"


def test_a_damaged_reference_is_remade(programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the checkpoint it is read in the run, and in both of them it is computed: by another model it is refused."""
    caplog.set_level(logging.INFO)
    output, settings = tmp_path / "run", programs.settings("dpo")
    shutil.copytree(programs.half("dpo").path, output)
    run_dir = RunDir(output)
    table, own = run_dir.checkpoint(HALF) / "trainer" / REFERENCE_NAME, output / REFERENCE_NAME
    table.write_bytes(table.read_bytes()[:-9])
    for fault, word in (("damaged", "is the same"), ("damaged", "are computed again"), ("missing", "is the same")):
        if fault == "missing":
            table.unlink()
        again = train("dpo", output, settings, until=STEPS, resume=HALF)
        assert differing(end_state(again), programs.whole("dpo")) == []
        (*_, said) = [line for line in caplog.messages if line.startswith(f"WARNING: {table} is {fault}")]
        assert word in said
        if word == "is the same":
            own.write_bytes(b"")
        shutil.rmtree(run_dir.checkpoint(STEPS))
    other = programs.settings("dpo, adapters, another reference")["loss"]["reference_model"]
    with pytest.raises(CheckpointError, match=f"model.name = '{other}', which is needed once more, has"):
        train("dpo", output, settings | {"model": {"name": other}}, until=STEPS, resume=HALF)


def test_what_a_reference_said_by_another_config_json_is_said_anew(programs: Programs, tmp_path: Path) -> None:
    """The weights are the same, and another rope_theta makes another model of them."""
    output, settings = tmp_path / "run", programs.settings("dpo", dropout=False)
    model = tmp_path / "model"
    shutil.copytree(settings["model"]["name"], model)
    settings |= {"model": settings["model"] | {"name": str(model)}}
    train("dpo", output, settings, until=1)
    before = (output / REFERENCE_NAME).read_bytes()
    shutil.rmtree(output / "checkpoints")  # as if it had been killed before its first one
    config = model / "config.json"
    fields = json.loads(config.read_text())
    fields["rope_parameters"]["rope_theta"] /= 2
    config.write_text(json.dumps(fields))
    run_dir = train("dpo", output, settings, until=1)
    assert (output / REFERENCE_NAME).read_bytes() != before and abs(column(run_dir, "rewards/margins")[0]) < 1e-6
