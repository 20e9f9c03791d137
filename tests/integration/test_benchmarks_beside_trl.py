"""The benchmarks that train beside TRL and plain loops, at toy size: ratios, curves and tables."""

import csv
import json
import re
from pathlib import Path

import pytest

from benchmarks.learning.results import NUMBERS, Run, read_runs
from tests.runs.forked_benchmarks import run_benchmark


def ratios(output: str) -> dict[str, float]:
    line = r"^.*: (?:tok/s, )?(\S+ / \S+): median (\d+\.\d\d) \(\S+ to \S+\)(?:, memory \S+)?$"
    return {pair: float(median) for pair, median in re.findall(line, output, re.MULTILINE)}


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
    assert len(re.findall(r", memory \d+\.\d\d$", output, re.MULTILINE)) == 3
    rates = {name: float(rate.replace(",", "")) for name, rate in re.findall(r"([\w-]+) ([\d,]+) tok/s", output)}
    for other in ("TRL-grouped", "TRL-packed", "plain-loop"):
        assert found[f"sft / {other}"] == pytest.approx(rates["sft"] / rates[other], rel=0.02, abs=0.006)


@pytest.mark.launch
@pytest.mark.trl
def test_rl_is_measured_beside_trl_and_a_synchronous_trainer(tmp_path: Path) -> None:
    few = ("--lengths", "24", "--steps", "6", "--rounds", "1")
    output = run_benchmark(tmp_path / "rl.log", "benchmarks.rl_throughput", *few)
    assert set(ratios(output)) == {"rl / TRL", "rl / synchronous"}
    speeds = re.findall(r"tokens: (\S+) (\d+\.\d+) s a step, ([\d,]+) tok/s$", output, re.MULTILINE)
    assert [name for name, _, _ in speeds] == ["rl", "TRL", "synchronous"]
    # The policy is the same and hardly moves, so a step has about as many tokens for all of them.
    tokens = [float(seconds) * float(rate.replace(",", "")) for _, seconds, rate in speeds]
    assert max(tokens) < 2 * min(tokens)


FEW = ("--seeds", "5", "--steps", "2", "--num-tasks", "8")


def run_toy(module: str, tmp_path: Path, *flags: str) -> str:
    folders = ("--output", str(tmp_path), "--runs", str(tmp_path / "runs"))
    return run_benchmark(tmp_path.with_suffix(".log"), module, *FEW, *folders, *flags)


def run_learning(tmp_path: Path, *flags: str) -> tuple[list[Run], str]:
    printed = run_toy("benchmarks.learning", tmp_path, *flags)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    return read_runs(tmp_path), printed


def run_lengths(tmp_path: Path, *flags: str) -> list[dict[str, str]]:
    run_toy("benchmarks.learning.lengths", tmp_path, *flags)
    with (tmp_path / "lengths.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.launch
@pytest.mark.trl
@pytest.mark.timeout(1800)  # seven programs, one after the other
def test_a_run_is_judged_before_and_after_beside_trl_and_not_made_twice(tmp_path: Path) -> None:
    runs, printed = run_learning(tmp_path, "--variants", "grpo", "trl")
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
    assert run_learning(tmp_path)[0] == runs, "what is finished stays, and the other runs of the files too"
    assert weights.stat().st_mtime_ns == made
    rows = run_lengths(tmp_path, "--lengths", "6", "--variants", "grpo")
    assert [(row["variant"], row["seed"], row["length"]) for row in rows if row["number"] == "greedy"] == [
        ("start", "", "6"),
        ("grpo", "5", "6"),
    ]
    answers = tmp_path / "runs" / "sort_letters" / "lengths" / "start_None_2_6" / "greedy_8" / "rollouts.jsonl"
    prompts = [json.loads(line)["turns"][0]["text"] for line in answers.read_text().splitlines()]
    assert {len(set(prompt.removeprefix("<|user|>").split("<")[0])) for prompt in prompts} == {6}
