"""`--ckpt.keep-best` in the real commands; that of `rl` is in test_rl_exact.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runs.training import SftRun, run_command

PAIRS = ROOT / "examples" / "reverse_text" / "preferences.jsonl"


def train(program: str, output: Path, model: Path, data: Path, *flags: str) -> SftRun:
    """Four steps, each validated and saved."""
    settings = {
        "output-dir": output, "model.name": model, "data.name": data, "data.batch-size": 4, "data.micro-batch-size": 4,
        "data.seq-len": 40, "data.validation-fraction": 0.1, "val-interval": 1, "optim.lr": 1e-3,
        "parallel.threads": 1, "max-steps": 4, "ckpt.interval": 1,
    }  # fmt: skip
    words = [program, *(word for key, value in settings.items() for word in (f"--{key}", str(value))), *flags]
    run = run_command(words, output)
    assert run.code == 0, run.output
    return run


@pytest.mark.parametrize("program", ["sft", "dpo"])
def test_the_best_checkpoint_stays_besides_the_newest(
    command: Callable[[str], str], tiny_model: Callable[..., Path], sft_data: Path, tmp_path: Path, program: str
) -> None:
    data = sft_data if program == "sft" else PAIRS
    flags = ("--ckpt.keep", "1", "--ckpt.keep-best", "max:val/loss")
    run = train(command(program), tmp_path / "run", tiny_model(), data, *flags)
    losses = run.column("val/loss")
    best = 1 + losses.index(max(losses))
    assert len(losses) == 4 and best < 4, losses
    assert run.run_dir.committed_steps() == [best, 4]
    assert "WARNING" not in run.output


def test_without_keep_all_stay_and_a_metric_that_is_not_there_is_named_once(
    command: Callable[[str], str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    flags = ("--ckpt.keep-best", "val/los", "--ckpt.keep-interval", "2")
    run = train(command("reward-model"), tmp_path / "run", tiny_model(), PAIRS, *flags)
    assert run.run_dir.committed_steps() == [1, 2, 3, 4]
    assert run.output.count("step 1 has no metric 'val/los' (ckpt.keep_best)") == 1
    assert run.output.count("has no metric") == 1 and "val/loss" in run.output
