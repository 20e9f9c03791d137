"""`dpo`, the real command: it learns, a killed run ends in the same bits, and what cannot work is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from holdfast.shared.files import manifest
from holdfast.shared.files.run_dir import REFERENCE_NAME, RunDir
from tests.conftest import ROOT
from tests.faults.held_steps import ASKED_TO_STOP, held_after, held_commit
from tests.forking.commands import shared_commands
from tests.runs.processes import wait_until
from tests.runs.training import PAIRS, SftRun, pairs_command, refused, run_pairs, run_sft, succeeded

COLUMNS = ("step", "loss", "grad_norm", "lr", "rewards/chosen", "rewards/accuracies", "logps/rejected", "samples")
TWO = ("--parallel.num-ranks", "2")
LENGTH = ("--max-steps", "8", "--data.validation-fraction", "0.1", "--val-interval", "3")
EXACT = (*LENGTH, "--ckpt.interval", "2")


@pytest.fixture(scope="module")
def run() -> Callable[..., SftRun]:
    """Return a function that runs a command to its end: `run(output, model, *flags, program='dpo')`."""
    return partial(run_pairs, program="dpo")


@pytest.fixture(scope="module")
def dropout(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(attention_dropout=0.3)


@pytest.fixture(scope="module")
def straight(run: Callable[..., SftRun], dropout: Path, tmp_path_factory: pytest.TempPathFactory) -> SftRun:
    return succeeded(run(tmp_path_factory.mktemp("dpo") / "straight", dropout, *EXACT))


@pytest.fixture(scope="module")
def straight_on_two(run: Callable[..., SftRun], dropout: Path, tmp_path_factory: pytest.TempPathFactory) -> SftRun:
    return succeeded(run(tmp_path_factory.mktemp("dpo") / "straight_on_two", dropout, *EXACT, *TWO))


@pytest.fixture(params=[(), pytest.param(TWO, marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], SftRun]:
    """The flags of one or two ranks, and the run of so many that nobody interrupts."""
    return request.param, request.getfixturevalue("straight_on_two" if request.param else "straight")


def same_run(resumed: SftRun, straight: SftRun) -> bool:
    """Whether two runs of 8 steps ended in the same weights, by the same steps, all of them different."""
    assert resumed.weights(8) == straight.weights(8)
    for name in COLUMNS:
        assert resumed.column(name) == straight.column(name) != [], name
    assert resumed.column("val/loss") == straight.column("val/loss")
    return len(set(straight.column("loss"))) == 8


def test_a_killed_run_ends_in_the_same_bits(
    run: Callable[..., SftRun],
    ranks: tuple[tuple[str, ...], SftRun],
    dropout: Path,
    tmp_path: Path,
) -> None:
    """With dropout, shuffling, packing, accumulation and validation on."""
    output, (flags, straight) = tmp_path / "killed", ranks
    argv = pairs_command("dpo", output, dropout, *EXACT, *flags)[1:]
    killed = shared_commands().start("dpo", output, argv, trainer_fault=held_commit(6))
    wait_until(lambda: "saved checkpoint  step 4" in killed.log or killed.has_ended, "the checkpoint of step 4")
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait().code == -signal.SIGKILL and RunDir(output).published_weights() == [], killed.log
    (output / REFERENCE_NAME).unlink()  # the checkpoint has it: that counts
    resumed = succeeded(run(output, dropout, *EXACT, *flags, "--ckpt.resume-step", "4"))
    assert "resuming from step 4" in resumed.output and "computing reference" not in resumed.output
    assert same_run(resumed, straight)


@pytest.mark.slow
def test_a_signal_saves_the_current_step_and_a_resume_goes_on_bit_for_bit(
    run: Callable[..., SftRun],
    ranks: tuple[tuple[str, ...], SftRun],
    dropout: Path,
    tmp_path: Path,
) -> None:
    """SIGTERM, as from a scheduler that wants the machine back; without it only the last step would be saved."""
    output, (flags, straight) = tmp_path / "stopped", ranks
    only_last = (*LENGTH, "--ckpt", *flags)
    argv = pairs_command("dpo", output, dropout, *only_last)[1:]
    stopped = shared_commands().start("dpo", output, argv, trainer_fault=held_after(6, until=ASKED_TO_STOP))
    wait_until(lambda: "step 1/8" in stopped.log or stopped.has_ended, "the first step")
    os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.wait().code == 128 + signal.SIGTERM, stopped.log
    (step,) = RunDir(output).committed_steps()
    assert 1 <= step < 8 and f"stopped at step {step} of 8, which is saved" in stopped.log
    resumed = succeeded(run(output, dropout, *only_last, "--ckpt.resume-step", "latest"))
    assert f"resuming from step {step}" in resumed.output
    assert same_run(resumed, straight)


def test_the_reference_is_in_every_checkpoint_and_that_of_the_start(straight: SftRun) -> None:
    contents = set()
    for step in (2, 4, 6, 8):
        directory = straight.run_dir.checkpoint(step)
        assert f"trainer/{REFERENCE_NAME}" in manifest.verify(directory).files
        contents.add((directory / "trainer" / REFERENCE_NAME).read_bytes())
    assert contents == {(straight.run_dir.path / REFERENCE_NAME).read_bytes()}
    with np.load(straight.run_dir.path / REFERENCE_NAME) as arrays:
        assert arrays["logprobs"].shape == (512, 2)


@pytest.mark.slow
def test_a_fork_takes_the_reference_along(
    run: Callable[..., SftRun], straight: SftRun, dropout: Path, tmp_path: Path
) -> None:
    source = straight.run_dir.checkpoint(4)
    fork = succeeded(run(tmp_path / "fork", dropout, *EXACT, "--ckpt.resume-dir", str(source)))
    assert fork.weights(8) == straight.weights(8)
    assert (fork.run_dir.path / REFERENCE_NAME).read_bytes() == (straight.run_dir.path / REFERENCE_NAME).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "columns"),
    [("dpo", COLUMNS), ("reward-model", (*COLUMNS[:6], "rewards/std", "samples"))],
    ids=["dpo", "reward-model"],
)
def test_two_ranks_train_what_one_does(
    run: Callable[..., SftRun], tiny_model: Callable[..., Path], tmp_path: Path, program: str, columns: tuple[str, ...]
) -> None:
    flags = ("--max-steps", "3")
    one = succeeded(run(tmp_path / "one", tiny_model(), *flags, program=program))
    two = succeeded(run(tmp_path / "two", tiny_model(), *flags, *TWO, program=program))
    for name in columns:
        # At the first step of DPO the policy is the reference: rounding decides who is ahead by 0.
        first = 1 if (program, name) == ("dpo", "rewards/accuracies") else 0
        assert two.column(name)[first:] == pytest.approx(one.column(name)[first:], rel=1e-3, abs=1e-5) != [], name


@pytest.mark.parametrize(
    "kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ipo", "apo_zero", "simpo", "orpo"))]
)
def test_every_loss_learns_to_prefer_the_chosen_side(run: Callable[..., SftRun], tmp_path: Path, kind: str) -> None:
    model = ROOT / "examples" / "reverse_text" / "model"
    flags = ("--loss.type", kind, "--max-steps", "15", "--data.batch-size", "32", "--data.micro-batch-size", "8",
             "--data.validation-fraction", "0.125", "--optim.lr", "3e-4")  # fmt: skip
    learnt = succeeded(run(tmp_path / kind, model, *flags))
    assert learnt.column("val/rewards/accuracies")[-1] > 0.9, learnt.column("val/rewards/accuracies")
    margins, losses = learnt.column("rewards/margins"), learnt.column("loss")
    assert margins[-1] > margins[0] and losses[-1] < losses[0]
    if kind == "dpo":  # the policy is its own reference
        assert losses[0] == pytest.approx(np.log(2), rel=1e-5) and margins[0] == pytest.approx(0, abs=1e-5)
    assert (learnt.run_dir.path / REFERENCE_NAME).exists() == (kind in ("dpo", "ipo", "apo_zero"))


@pytest.mark.slow
def test_other_pairs_and_other_programs_are_refused_on_resume(
    run: Callable[..., SftRun], straight: SftRun, dropout: Path, sft_data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(straight.run_dir.path, copy)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:100]))
    resume = (*EXACT[2:], "--max-steps", "9", "--ckpt.resume-step", "8")
    refused(run(copy, dropout, *resume, "--data.name", str(fewer)), "about other pairs", "--ckpt.weights-only")
    by_sft = run_sft(copy, dropout, sft_data, "--max-steps", "9", "--ckpt.resume-step", "8")
    refused(by_sft, "a checkpoint of dpo, and sft cannot go on from it")
    made = run_sft(tmp_path / "sft", dropout, sft_data, "--max-steps", "1", "--ckpt")
    by_dpo = run(made.run_dir.path, dropout, "--max-steps", "2", "--ckpt.resume-step", "1")
    refused(by_dpo, "a checkpoint of sft, and dpo cannot go on from it", "--ckpt.weights-only")
    warm = run(tmp_path / "warm", dropout, "--max-steps", "1", "--ckpt.weights-only", str(made.run_dir.checkpoint(1)))
    assert succeeded(warm).column("loss") == pytest.approx([np.log(2)], abs=0.2)


@pytest.mark.slow
def test_a_run_against_another_model_goes_on_against_that_one_alone(
    run: Callable[..., SftRun], tiny_model: Callable[..., Path], dropout: Path, tmp_path: Path
) -> None:
    """With adapters, which a reference has none of; killed runs resume in the same bits, other weights are refused."""
    reference = tmp_path / "reference"
    shutil.copytree(tiny_model(seed=5), reference)
    flags = ("--loss.reference-model", str(reference), "--model.lora.rank", "4", "--ckpt.interval", "2")
    whole = succeeded(run(tmp_path / "whole", dropout, *flags, "--max-steps", "4"))
    assert abs(whole.column("rewards/chosen")[0]) > 0.01, "the policy is not its own reference"
    succeeded(run(tmp_path / "parts", dropout, *flags, "--max-steps", "2"))
    resume = ("--max-steps", "4", "--ckpt.resume-step", "2")
    resumed = succeeded(run(tmp_path / "parts", dropout, *flags, *resume))
    assert "computing reference" not in resumed.output
    assert resumed.weights(4) == whole.weights(4) and resumed.column("loss") == whole.column("loss")
    own = ("--model.lora.rank", "4", "--ckpt.interval", "2")
    refused(run(tmp_path / "parts", dropout, *own, *resume), "under a reference model", "it is unset now")
    shutil.rmtree(reference)
    shutil.copytree(tiny_model(seed=6), reference)
    refused(run(tmp_path / "parts", dropout, *flags, *resume), "under a reference model", "as the run began with it")
    refused(run(tmp_path / "no", dropout, "--loss.reference-model", "./no"), "loss.reference_model", "./no")


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_kto_resumes_in_the_same_bits(run: Callable[..., SftRun], dropout: Path, tmp_path: Path, ranks: str) -> None:
    """Of pairs, with dropout; what the reference says of mismatched answers is that of the start as well."""
    flags = ("--loss.type", "kto", "--ckpt.interval", "2", "--data.validation-fraction", "0.1",
             "--parallel.num-ranks", ranks)  # fmt: skip
    whole = succeeded(run(tmp_path / "whole", dropout, *flags, "--max-steps", "4"))
    succeeded(run(tmp_path / "parts", dropout, *flags, "--max-steps", "2"))
    resumed = succeeded(run(tmp_path / "parts", dropout, *flags, "--max-steps", "4", "--ckpt.resume-step", "2"))
    assert resumed.weights(4) == whole.weights(4)
    for name in ("loss", "kl", "rewards/chosen", "rewards/rejected", "desirable"):
        assert resumed.column(name) == whole.column(name) != [], name
    assert resumed.column("val/kl")[-1] == whole.column("val/kl")[-1]
    with np.load(whole.run_dir.path / REFERENCE_NAME) as arrays:
        assert arrays["logprobs"].shape == (1024, 2)


@pytest.mark.slow
def test_two_ranks_train_labelled_answers_as_one_does_and_learn(run: Callable[..., SftRun], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(
        json.dumps({"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}) + "\n"
        for row in rows for side in ("chosen", "rejected")
    ))  # fmt: skip
    model = ROOT / "examples" / "reverse_text" / "model"
    flags = ("--loss.type", "kto", "--data.name", str(file), "--max-steps", "15", "--data.batch-size", "32",
             "--data.micro-batch-size", "8", "--data.validation-fraction", "0.125", "--optim.lr", "3e-4")  # fmt: skip
    one, two = (succeeded(run(tmp_path / ranks, model, *flags, "--parallel.num-ranks", ranks)) for ranks in ("1", "2"))
    for name in ("loss", "kl", "rewards/chosen", "rewards/rejected", "grad_norm"):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-2, abs=1e-3) != [], name
    assert one.column("loss")[0] == pytest.approx(0.5, abs=1e-6) and one.column("kl")[0] == pytest.approx(0, abs=1e-5)
    assert one.column("val/rewards/margins")[-1] > 0.5 and one.column("loss")[-1] < 0.49


@pytest.mark.slow
def test_a_run_without_a_reference_cannot_take_one_up(
    run: Callable[..., SftRun], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    output, without = tmp_path / "free", ("--loss.reference", "none", "--ckpt")
    succeeded(run(output, tiny_model(), *without, "--max-steps", "1"))
    flags = ("--max-steps", "2", "--ckpt.resume-step", "1")
    refused(run(output, tiny_model(), *flags), "--loss.reference none")
    succeeded(run(output, tiny_model(), *flags, *without))


def test_a_dry_run_starts_nothing_and_bad_input_is_named(
    run: Callable[..., SftRun], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, output = tiny_model(), tmp_path / "dry"
    dry = succeeded(run(output, model, "--dry-run"))
    assert "would start afresh" in dry.output and not (output / "run.json").exists()
    refused(run(output, model, "--loss.type", "cpo"), "loss.type", "simpo")
    refused(run(output, model, "--loss.type", "simpo", "--loss.reference", "precomputed"), "simpo has no reference")
    refused(run(output, model, "--data.name", str(tmp_path / "no.jsonl")), "no such file")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    refused(run(output, model, "--data.name", str(bad)), "rows need `prompt`, `chosen` and `rejected`")
    assert not output.joinpath("checkpoints").exists()


@pytest.mark.slow
def test_clean_removes_the_reference_of_the_run_before(straight: SftRun, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(straight.run_dir.path, copy)
    RunDir(copy).remove_run()
    assert not (copy / REFERENCE_NAME).exists()
