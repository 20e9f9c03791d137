"""`reward-model`, the real command: it learns, a killed run ends in the same bits, and what cannot work is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from holdfast.shared.files.run_dir import RunDir
from tests.conftest import ROOT
from tests.faults.held_steps import held_commit
from tests.forking.commands import shared_commands
from tests.runs.processes import wait_until
from tests.runs.training import PAIRS, SftRun, pairs_command, refused, run_pairs, run_sft, succeeded

EXAMPLE = ROOT / "examples" / "reverse_text"
COLUMNS = ("step", "loss", "grad_norm", "lr", "rewards/chosen", "rewards/accuracies", "rewards/std", "samples")
EXACT = ("--max-steps", "8", "--ckpt.interval", "2", "--data.validation-fraction", "0.1", "--val-interval", "3",
         "--loss.center-coef", "0.01")  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Callable[..., SftRun]:
    """Return a function that runs a command to its end: `run(output, model, *flags, program='reward-model')`."""
    return partial(run_pairs, program="reward-model")


@pytest.fixture(scope="module")
def dropout(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(attention_dropout=0.3)


@pytest.fixture(scope="module")
def straight(run: Callable[..., SftRun], dropout: Path, tmp_path_factory: pytest.TempPathFactory) -> SftRun:
    return succeeded(run(tmp_path_factory.mktemp("reward_model") / "straight", dropout, *EXACT))


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(
    run: Callable[..., SftRun], straight: SftRun, dropout: Path, tmp_path: Path
) -> None:
    """With dropout, shuffling, packing, accumulation and validation on."""
    output = tmp_path / "killed"
    argv = pairs_command("reward-model", output, dropout, *EXACT)[1:]
    killed = shared_commands().start("reward-model", output, argv, trainer_fault=held_commit(6))
    wait_until(lambda: "saved checkpoint  step 4" in killed.log or killed.has_ended, "the checkpoint of step 4")
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait().code == -signal.SIGKILL and RunDir(output).published_weights() == [], killed.log
    resumed = succeeded(run(output, dropout, *EXACT, "--ckpt.resume-step", "4"))
    assert "resuming from step 4" in resumed.output
    assert resumed.weights(8) == straight.weights(8)
    for name in (*COLUMNS, "val/loss", "val/rewards/std"):
        assert resumed.column(name) == straight.column(name) != [], name
    assert len(set(straight.column("loss"))) == 8


def test_it_learns_to_score_the_chosen_side_higher_and_transformers_scores_alike(
    run: Callable[..., SftRun], tmp_path: Path
) -> None:
    flags = ("--max-steps", "25", "--data.batch-size", "32", "--data.micro-batch-size", "8",
             "--data.validation-fraction", "0.125", "--val-interval", "1")  # fmt: skip
    learnt = succeeded(run(tmp_path / "learnt", EXAMPLE / "model", *flags))
    accuracies = learnt.column("val/rewards/accuracies")
    assert accuracies[-1] > 0.75 and accuracies[-1] > accuracies[0] + 0.1, accuracies
    assert learnt.column("val/rewards/margins")[-1] > 1 and learnt.column("val/loss")[-1] < 0.5
    directory = learnt.run_dir.weights_of(25)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["pad_token_id"] == 0 and list(config["id2label"]) == ["0"]
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()[:64]]

    @torch.no_grad()
    def score(row: dict[str, list[dict[str, str]]], side: str) -> float:
        ids = tokenizer.apply_chat_template(row["prompt"] + row[side], return_tensors="pt", return_dict=False)
        return model(ids).logits.item()

    right = sum(score(row, "chosen") > score(row, "rejected") for row in rows)
    assert right / len(rows) > 0.75


def export(command: Callable[[str], str], run: SftRun, step: int, target: Path, *flags: object) -> None:
    argv = (command("ckpt"), "export", step, "--to", target, "--output-dir", run.run_dir.path, *flags)
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_adapters_and_head_resume_in_the_same_bits_and_are_exported(
    run: Callable[..., SftRun],
    tiny_model: Callable[..., Path],
    command: Callable[[str], str],
    tmp_path: Path,
    ranks: str,
) -> None:
    """With dropout; of a language model with an output layer of its own, which the reward model has not."""
    base = tiny_model("llama", tied=False, attention_dropout=0.3)
    flags = ("--model.lora.rank", "4", "--ckpt.interval", "2", "--parallel.num-ranks", ranks)
    whole = succeeded(run(tmp_path / "whole", base, *flags, "--max-steps", "4"))
    succeeded(run(tmp_path / "parts", base, *flags, "--max-steps", "2"))
    resume = ("--max-steps", "4", "--ckpt.resume-step", "2")
    resumed = succeeded(run(tmp_path / "parts", base, *flags, *resume))
    assert resumed.weights(4) == whole.weights(4) and len(set(whole.column("loss"))) == 4
    for name in ("loss", "grad_norm", "rewards/std"):
        assert resumed.column(name) == whole.column(name) != [], name
    refused(run(tmp_path / "parts", tiny_model("llama", tied=False, seed=3), *flags, *resume), "on other weights")
    weights = whole.run_dir.weights_of(4)
    export(command, whole, 4, tmp_path / "alone")
    export(command, whole, 4, tmp_path / "merged", "--base", base)
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == whole.weights(4)
    for path in (weights / "adapter").iterdir():
        assert (tmp_path / "alone" / path.name).read_bytes() == path.read_bytes(), path


@pytest.mark.slow
def test_adapters_of_two_ranks_are_those_of_one_and_go_on_from_a_reward_model(
    run: Callable[..., SftRun],
    tiny_model: Callable[..., Path],
    straight: SftRun,
    command: Callable[[str], str],
    tmp_path: Path,
) -> None:
    flags = ("--model.lora.rank", "4", "--max-steps", "3")
    one, two = (
        succeeded(run(tmp_path / ranks, tiny_model(), *flags, "--parallel.num-ranks", ranks)) for ranks in ("1", "2")
    )
    for name in ("loss", "grad_norm", "rewards/std", "rewards/accuracies"):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-3, abs=1e-5) != [], name
    further = ("--model.lora", *EXACT[4:6], "--max-steps", "1", "--optim.lr", "1e-12", "--ckpt")
    judged = succeeded(run(tmp_path / "further", straight.run_dir.weights_of(8), *further))
    assert judged.column("val/rewards/std") == pytest.approx(straight.column("val/rewards/std")[-1:], rel=1e-4)
    export(command, judged, 1, tmp_path / "merged", "--base", straight.run_dir.weights_of(8))
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == judged.weights(1)


@pytest.mark.slow
def test_a_reward_model_is_trained_further_from_what_was_published(
    run: Callable[..., SftRun], straight: SftRun, tmp_path: Path
) -> None:
    flags = (*EXACT[4:6], "--max-steps", "1", "--optim.lr", "1e-12")
    further = succeeded(run(tmp_path / "further", straight.run_dir.weights_of(8), *flags))
    assert further.column("val/rewards/std") == pytest.approx(straight.column("val/rewards/std")[-1:], rel=1e-4)
    warm = succeeded(
        run(tmp_path / "warm", straight.run_dir.weights_of(8), *flags,
            "--ckpt.weights-only", str(straight.run_dir.checkpoint(8)))
    )  # fmt: skip
    assert warm.column("loss") == further.column("loss") and warm.weights(1) == further.weights(1)


@pytest.mark.slow
def test_other_programs_do_not_go_on_from_a_reward_model(
    run: Callable[..., SftRun], straight: SftRun, dropout: Path, sft_data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(straight.run_dir.path, copy)
    resume = ("--max-steps", "9", "--ckpt.resume-step", "8")
    refused(run_sft(copy, dropout, sft_data, *resume), "a checkpoint of reward-model, and sft cannot go on from it")
    refused(run(copy, dropout, *resume, program="dpo"), "a checkpoint of reward-model, and dpo cannot go on from it")
    weights = ("--max-steps", "1", "--ckpt.weights-only", str(straight.run_dir.checkpoint(8)))
    refused(run_sft(tmp_path / "warm", dropout, sft_data, *weights), "does not fit this model", "score.weight")
    published = run_sft(tmp_path / "model", straight.run_dir.weights_of(8), sft_data, "--max-steps", "1",
                        "--model.init", "pretrained")  # fmt: skip
    refused(published, "scores whole sequences", "give a language model")
    made = run_sft(tmp_path / "sft", dropout, sft_data, "--max-steps", "1", "--ckpt")
    by_rm = run(made.run_dir.path, dropout, "--max-steps", "2", "--ckpt.resume-step", "1")
    refused(by_rm, "a checkpoint of sft, and reward-model cannot go on from it")


def test_a_dry_run_starts_nothing_and_bad_input_is_named(
    run: Callable[..., SftRun], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, output = tiny_model(), tmp_path / "dry"
    dry = succeeded(run(output, model, "--dry-run"))
    assert "would start afresh" in dry.output and not (output / "run.json").exists()
    refused(run(output, model, "--loss.center-coef", "-1"), "loss.center_coef")
    refused(run(output, model, "--loss.centre-coef", "1"), "loss.center-coef")
    refused(run(output, model, "--data.name", str(tmp_path / "no.jsonl")), "no such file")
    assert not output.joinpath("checkpoints").exists()
