"""The benchmark of runs that learn, from end to end at toy size: demonstrations, training, TRL, evaluations, tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning.results import NUMBERS, Run, read_runs
from tests.conftest import ROOT


def run_benchmark(tmp_path: Path, *flags: str) -> tuple[list[Run], str]:
    command = [sys.executable, "-m", "benchmarks.learning", "--seeds", "5", "--steps", "2", "--num-tasks", "8",
               "--output", str(tmp_path), "--runs", str(tmp_path / "runs"), *flags]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    return read_runs(tmp_path), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)  # nine programs, one after the other
def test_a_run_is_judged_before_and_after_beside_trl_and_not_made_twice(tmp_path: Path) -> None:
    runs, printed = run_benchmark(tmp_path, "--variants", "grpo", "trl")
    ours, theirs = runs
    assert [(run.task, run.variant, run.seed) for run in runs] == [(ours.task, name, 5) for name in ("grpo", "trl")]
    assert ours.before == theirs.before, "both start from the same weights"
    assert list(ours.curve) == [0, 2] and list(theirs.curve) == [0, 1, 2]
    for run in runs:
        assert all(one.low <= one.value <= one.high for name in NUMBERS for one in (run.before[name], run.after[name]))
        assert f"| `sort_letters` | `{run.variant}` | 5 | 2 |" in printed
    weights = tmp_path / "runs" / "sort_letters" / "grpo_5_2" / "run" / "weights" / "step_2" / "model.safetensors"
    start = next((tmp_path / "runs" / "sort_letters" / "start" / "sft" / "weights").glob("*/model.safetensors"))
    assert weights.read_bytes() != start.read_bytes()

    made = weights.stat().st_mtime_ns
    assert run_benchmark(tmp_path)[0] == runs, "what is finished stays, and the other runs of the files too"
    assert weights.stat().st_mtime_ns == made
