"""Small benchmarks run from end to end, on the stub engine, and print what they say; `trl` has files of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.algorithms.curves import Curve, read_curves
from tests.conftest import ROOT
from tests.runs.forked_benchmarks import run_benchmark
from tests.runs.ports import free_port

pytestmark = pytest.mark.launch


def run_algorithm(algorithm: str, output: Path, *, steps: int) -> Curve:
    flags = ("--algorithms", algorithm, "--seeds", "5", "--steps", str(steps), "--output", str(output))
    own = ("--port", str(free_port()), "--threads", "1")
    printed = run_benchmark(output.with_suffix(".log"), "benchmarks.algorithms", *flags, *own)
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    (curve,) = read_curves(output / "curves.csv")
    assert (curve.algorithm, curve.seed) == (algorithm, 5)
    assert f"reward {curve.start:.3f} to {curve.end:.3f}" in printed
    return curve


def test_rl_is_measured_step_by_step(tmp_path: Path) -> None:
    curve = run_algorithm("max_rl", tmp_path, steps=2)
    assert list(curve.points) == [1, 2]
    assert 0.3 < curve.start < 0.9
    assert curve.points[1]["ref_kld"] == 0 < curve.points[2]["ref_kld"]
    assert all(point["entropy"] > 0 and point["grad_norm"] > 0 for point in curve.points.values())


def test_the_weights_of_dpo_are_judged_by_rollouts(tmp_path: Path) -> None:
    curve = run_algorithm("dpo", tmp_path, steps=1)
    assert list(curve.points) == [0, 1]
    assert 0.3 < curve.start < 0.9
    assert curve.points[0]["ref_kld"] == 0, "before training the policy is the reference"
    assert curve.points[1]["ref_kld"] > 0, "the judged weights are the trained ones"
    assert "loss" not in curve.points[0] and curve.points[1]["loss"] > 0


@pytest.mark.parametrize(
    ("module", "flags", "shown"),
    [
        ("balance", ("--batches", "5"), r"│ +64 │"),
        (
            "journal",
            ("--rollouts", "32", "--batch", "16", "--tokens", "20", "--rounds", "1", "--engine-rate", "500"),
            r"^rollouts/s with / without: \d+\.\d{3} by the clock",
        ),
        (
            "sessions",
            ("--sessions", "64", "--batches", "2", "--tokens", "120", "--rounds", "1"),
            r"^ *tool: 128 rollouts, none lost: [\d,]+/s by the clock.* KiB a session",
        ),
        (
            "shared_prompts",
            ("--rounds", "1", "--prompts", "2", "--prompt-tokens", "64"),
            r"^  trl / shared: \d",
        ),
    ],
    ids=str,
)
def test_a_benchmark_runs_to_its_end(module: str, flags: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path)) if module in ("journal", "sessions") else ()
    command = [sys.executable, "-m", f"benchmarks.{module}", *flags, *folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout, re.MULTILINE), done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is left"
