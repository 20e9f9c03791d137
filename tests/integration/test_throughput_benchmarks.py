"""`benchmarks.sft_throughput` and `benchmarks.rl_throughput` train with all contestants, and print ratios."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runs.forked_benchmarks import run_benchmark


def ratios(output: str) -> dict[str, float]:
    """Return medians by what is compared."""
    found = re.findall(r"^.*: (?:tok/s, )?(\S+ / \S+): median (\d+\.\d\d) \(\S+ to \S+\)$", output, re.MULTILINE)
    return {pair: float(median) for pair, median in found}


@pytest.mark.launch
@pytest.mark.trl
def test_sft_is_measured_beside_trl_and_a_plain_loop(tmp_path: Path) -> None:
    output = run_benchmark(
        tmp_path / "sft.log", "benchmarks.sft_throughput", "--sizes", "0.6M", "--kinds", "ragged", "--steps", "5",
        "--rounds", "1", "--batch-size", "4", "--micro-batch-size", "2",
        "--contestants", "sft,TRL-grouped,TRL-packed,plain-loop",
    )  # fmt: skip
    found = ratios(output)
    assert set(found) == {"sft / TRL-grouped", "sft / TRL-packed", "sft / plain-loop"}
    rates = {name: float(rate.replace(",", "")) for name, rate in re.findall(r"([\w-]+) ([\d,]+) tok/s", output)}
    for other in ("TRL-grouped", "TRL-packed", "plain-loop"):
        assert found[f"sft / {other}"] == pytest.approx(rates["sft"] / rates[other], rel=0.02, abs=0.006)


@pytest.mark.launch
@pytest.mark.trl
def test_rl_is_measured_beside_trl_and_a_synchronous_trainer(tmp_path: Path) -> None:
    output = run_benchmark(
        tmp_path / "rl.log", "benchmarks.rl_throughput", "--lengths", "24", "--steps", "6", "--rounds", "1"
    )
    assert set(ratios(output)) == {"rl / TRL", "rl / synchronous"}
    speeds = re.findall(r"tokens: (\S+) (\d+\.\d+) s a step, ([\d,]+) tok/s$", output, re.MULTILINE)
    assert [name for name, _, _ in speeds] == ["rl", "TRL", "synchronous"]
    # The policy is the same and hardly moves, so a step has about as many tokens for all of them.
    tokens = [float(seconds) * float(rate.replace(",", "")) for _, seconds, rate in speeds]
    assert max(tokens) < 2 * min(tokens)


@pytest.mark.launch
@pytest.mark.parametrize("module", ["sft", "rl"])
def test_what_is_not_known_is_refused(module: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}_throughput", "--contestants", "verl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--contestants verl: there are" in done.stderr
