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


def printed_by(module: str, *flags: str | Path) -> str:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_eight_ranks_are_busy_whatever_the_lengths() -> None:
    printed = printed_by("balance", "--batches", "5")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert len(rows) == 4 * 3 * 3
    for samples, lengths, ranks, dealt, balanced, most, _ in rows:
        assert float(dealt) <= float(balanced) <= float(most), (samples, lengths, ranks)
        assert int(ranks) == 64 or float(balanced) >= 0.95, (samples, lengths, ranks)


def test_the_journal_is_measured_with_and_without(tmp_path: Path) -> None:
    few = ("--rollouts", "32", "--batch", "16", "--tokens", "20", "--rounds", "1", "--engine-rate", "500")
    printed = printed_by("journal", *few, "--folder", tmp_path)
    servers = [line.removeprefix("server: ") for line in printed.splitlines() if line.startswith("server:")]
    assert servers == [f"{pace}; 32 rollouts of 20 tokens" for pace in ("at once", "paced, 500 rollouts/s")]
    appends = [float(found) for found in re.findall(r"journal: .* longest append (\S+) ms", printed)]
    assert len(appends) == 4 and appends[1] == appends[3] == 0.0, "two rounds each, and without means without"
    assert len(re.findall(r"^rollouts/s with / without: \d+\.\d{3} by the clock", printed, re.MULTILINE)) == 2
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_no_session_is_lost(tmp_path: Path) -> None:
    few = ("--sessions", "64", "--batches", "2", "--tokens", "120", "--rounds", "1")
    printed = printed_by("sessions", *few, "--folder", tmp_path)
    found = re.findall(r"^ *(\w+): 128 rollouts, none lost: [\d,]+/s by the clock.* KiB a session", printed, re.M)
    assert found == ["single", "tool"], printed
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_shared_prompt_is_computed_once_for_its_eight_answers() -> None:
    printed = printed_by("shared_prompts", "--rounds", "1", "--prompts", "2", "--prompt-tokens", "64")
    lines = re.findall(r"^ *(shared|apart|trl) +([\d,]+) tokens", printed, re.M)
    tokens = {name: int(number.replace(",", "")) for name, number in lines}
    assert tokens["apart"] - tokens["shared"] == 2 * 7 * 64
    assert tokens["trl"] >= tokens["apart"], "padded to the longest"
    assert re.search(r"^  trl / shared: \d", printed, re.M)


def test_rounds_keep_engines_fuller_in_the_model() -> None:
    printed = printed_by("schedule", "--engines", "1", "--tokens", "256", "--answers", "2")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()[2:]]
    assert len(rows) == 2
    for named, *shares in rows:
        strict, in_rounds, kept = map(float, shares)
        assert 1.35 * strict < in_rounds < kept < 1, named


@pytest.mark.engine
def test_both_transports_of_weights_are_measured() -> None:
    printed = printed_by("weight_sync", "--sizes", "3M", "--rounds", "1")
    assert re.search(r"3M, 10\.2 MB: directory \d+\.\d+ s .*, collective \d+\.\d+ s .*; a copy of the bytes", printed)
