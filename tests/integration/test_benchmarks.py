"""Every program of benchmarks/ has a smallest form, which runs to its end; what it prints is what it says it measures.
Most have a line of `FORMS`: flags, and a check of what is printed. `TESTED` names the tests of the others."""

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.algorithms.curves import read_curves
from benchmarks.algorithms.runs import NAMES
from benchmarks.learning import gsm8k
from benchmarks.schedule import calibrate
from tests.conftest import ROOT
from tests.forking.engines import config_of, start_server
from tests.pages import guarantees
from tests.runs.forked_benchmarks import run_benchmark
from tests.runs.ports import free_port
from tests.runs.processes import WITH_STUB_ENGINE
from tests.runs.rl import MODEL, SMALL_BATCH, succeeded

_BESIDE_TRL = "test_benchmarks_beside_trl.py"
_SFT = f"{_BESIDE_TRL}::test_sft_is_measured_beside_trl_and_a_plain_loop"
_RL = f"{_BESIDE_TRL}::test_rl_is_measured_beside_trl_and_a_synchronous_trainer"
_LEARNING = f"{_BESIDE_TRL}::test_a_run_is_judged_before_and_after_beside_trl_and_not_made_twice"
_PRINTED = "test_benchmarks.py::test_the_smallest_form_prints_what_it_measures"
TESTED = {
    "algorithms": "test_benchmarks.py::test_every_algorithm_is_measured_step_by_step",
    "journal.stub": _PRINTED,  # `journal` starts it
    "learning": _LEARNING,
    "learning.gsm8k": "test_benchmarks.py::test_rows_of_a_dataset_like_that_of_the_hub_are_written",
    "learning.lengths": _LEARNING,
    "learning.trl_grpo": _LEARNING,
    "rl_throughput": _RL,
    "rl_throughput.synchronous": _RL,
    "rl_throughput.trl_grpo": _RL,
    "schedule.calibrate": "test_benchmarks.py::test_the_constants_of_an_engine_are_fitted_to_its_steps",
    "sessions.stub": _PRINTED,
    "sft_throughput": _SFT,
    "sft_throughput.plain_loop": _SFT,
    "sft_throughput.trl_sft": _SFT,
}
"""The test that runs a program to its end, by the program."""


@dataclass(frozen=True)
class Form:
    """What a benchmark is given, with `{folder}` for an empty directory, and what is asked of its output.

    `engine`: it starts vLLM. `is_emptied`: it leaves nothing in the folder."""

    flags: str
    check: Callable[[str], None]
    engine: bool = False
    is_emptied: bool = False


def cells(printed: str) -> Iterator[list[str]]:
    """Give the cells of every row of a table of rich."""
    for line in printed.splitlines():
        if "│" in line:
            yield [cell.strip() for cell in line.split("│")[1:-1]]


def numbers(pattern: str, printed: str) -> list[float]:
    """Return what the only group of a pattern has found, line by line: finite numbers above zero."""
    found = [float(text.replace(",", "")) for text in re.findall(pattern, printed, re.MULTILINE)]
    assert found and all(math.isfinite(number) and number > 0 for number in found), (pattern, printed)
    return found


def lines(*patterns: str) -> Callable[[str], None]:
    """Return a check that each pattern is in what is printed, with numbers that are finite and not negative."""

    def check(printed: str) -> None:
        for pattern in patterns:
            found = re.findall(pattern, printed, re.MULTILINE)
            assert found, (pattern, printed)
            values = [
                float(text.replace(",", "")) for one in found for text in ([one] if isinstance(one, str) else one)
            ]
            assert all(math.isfinite(value) and value >= 0 for value in values), (pattern, printed)

    return check


def eight_ranks_are_busy_whatever_the_lengths(printed: str) -> None:
    rows = list(cells(printed))
    assert len(rows) == 4 * 3 * 3
    for samples, lengths, ranks, dealt, balanced, most, _ in rows:
        assert float(dealt) <= float(balanced) <= float(most), (samples, lengths, ranks)
        assert int(ranks) == 64 or float(balanced) >= 0.95, (samples, lengths, ranks)


def a_shared_prompt_is_computed_once_for_its_eight_answers(printed: str) -> None:
    lines = re.findall(r"^ *(shared|apart|trl) +([\d,]+) tokens", printed, re.M)
    tokens = {name: int(number.replace(",", "")) for name, number in lines}
    assert tokens["apart"] - tokens["shared"] == 2 * 7 * 64
    assert tokens["trl"] >= tokens["apart"], "padded to the longest"
    assert len(numbers(r"^  (?:trl|apart) / shared: (\S+)", printed)) == 2


def rounds_keep_engines_fuller_in_the_model(printed: str) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()[2:]]
    assert len(rows) == 2
    for named, *shares in rows:
        strict, in_rounds, kept = map(float, shares)
        assert 1.35 * strict < in_rounds < kept < 1, named


def the_remark_costs_reward_and_leaving_it_out_pays(printed: str) -> None:
    (line,) = (line for line in printed.splitlines() if line.startswith("examples/reverse_text/model "))
    shares = [tuple(map(float, pair)) for pair in re.findall(r"(\d\.\d{3}) / (\d\.\d{3})", line)]
    assert len(shares) == 4 and all(0 <= exact <= reward <= 1 for reward, exact in shares)
    sampled, sampled_cut, greedy, greedy_cut = (reward for reward, _ in shares)
    assert sampled + 0.1 < sampled_cut and greedy + 0.1 < greedy_cut


def a_save_is_measured_in_every_way(printed: str) -> None:
    rows = {name: (float(seconds), rate) for name, seconds, rate in cells(printed)}
    seconds = {name: value for name, (value, _) in rows.items()}
    (size_gb,) = numbers(r"(\S+) GB of state", printed)
    assert len(rows) == 12 and all(math.isfinite(value) and value >= 0 for value in seconds.values())
    for name in ("plain save", "raw write", "async save, quiet"):
        assert float(rows[name][1]) == pytest.approx(size_gb / seconds[name], rel=0.2), name
    for text, over, under in (
        ("loop blocked by an async save / by a plain dcp.save", "blocked", "plain save"),
        ("the same where the copy is made at the call", "blocked, copy at the call", "plain save"),
        ("steps beside a save / steps alone", "step beside save", "step alone"),
        ("steps beside a save / steps beside another writer", "step beside save", "step beside writer"),
        ("bytes per second of a save / of raw fsynced writes", "raw write", "async save, quiet"),
    ):
        (ratio,) = numbers(rf"^{re.escape(text)}: (\S+)$", printed)
        rounding = 0.0006 * (1 + ratio) / seconds[under] if seconds[under] else math.inf
        assert ratio == pytest.approx(seconds[over] / max(seconds[under], 1e-9), abs=rounding + 0.001), text
    assert numbers(r"^peak extra memory of an async save / state: (\S+)$", printed)


FORMS = {
    "algorithms.evaluate": Form(
        "examples/reverse_text/model --problems 32", the_remark_costs_reward_and_leaving_it_out_pays
    ),
    "balance": Form("--batches 5", eight_ranks_are_busy_whatever_the_lengths),
    "checkpoint": Form("--rounds 2 --width 256 --directory {folder}", a_save_is_measured_in_every_way, is_emptied=True),
    "journal": Form(
        "--rollouts 32 --batch 16 --tokens 20 --rounds 1 --engine-rate 500 --folder {folder}",
        lines(r"^rollouts/s with / without: (\d+\.\d{3}) by the clock", r"longest append (\S+) ms"),
        is_emptied=True,
    ),
    "recovery": Form(
        "--rounds 1 --victims rank_0 engine launcher",
        lines(r"^cold start +(\S+) s$", r"^(?:.*) killed +(\S+) s \((\S+)\) +(\S+) s \((\S+)\)$"),
        engine=True,
    ),
    "report": Form("50", lines(r"^50 steps, 5,000 rollouts: (\S+) s, (\S+) s of a core, (\d+) MiB, page of (\S+) MB$")),
    "scale": Form(
        "--models 70b --ranks 4,8",
        lines(r"items per rank +│ +(2,?892) +│ +(2,?892)", r"manifest kB +│ +(\S+) +│ +(\S+)"),
    ),
    "schedule": Form("--engines 1 --tokens 256 --answers 2", rounds_keep_engines_fuller_in_the_model),
    "sessions": Form(
        "--sessions 64 --batches 2 --tokens 120 --rounds 1 --folder {folder}",
        lines(r"^ *(?:single|tool): (128) rollouts, none lost: ([\d,]+)/s by the clock.* KiB a session"),
        is_emptied=True,
    ),
    "shared_prompts": Form(
        "--rounds 1 --prompts 2 --prompt-tokens 64", a_shared_prompt_is_computed_once_for_its_eight_answers
    ),
    "start_data": Form("--chats 4100", lines(r"^([\d,]+) letters in messages", r"the cache takes (\d+) MiB$")),
    "startup": Form(
        "--rounds 1", lines(r"^(?:sft|rl): command to first trained step: median (\S+) s, the first time (\S+) s")
    ),
    "weight_sync": Form(
        "--sizes 3M --rounds 1",
        lines(r"3M, 10\.2 MB: directory (\d+\.\d+) s .*, collective (\d+\.\d+) s .*; a copy of the bytes"),
        engine=True,
    ),
}


def test_every_benchmark_has_a_smallest_form() -> None:
    programs = {
        ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert sorted([*FORMS, *TESTED]) == sorted(programs), "each program needs one line of FORMS or TESTED"
    assert not [name for name in TESTED.values() if not guarantees.exists(name)]


@pytest.mark.launch
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.engine] * form.engine) for name, form in FORMS.items()]
)
def test_the_smallest_form_prints_what_it_measures(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    flags = form.flags.format(folder=tmp_path).split()
    engine = {} if form.engine else WITH_STUB_ENGINE
    command, environment = [sys.executable, "-m", f"benchmarks.{name}", *flags], {**os.environ, **engine}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    form.check(done.stdout)
    assert not form.is_emptied or not list(tmp_path.iterdir()), "something is left"


@pytest.mark.launch
@pytest.mark.timeout(900)
def test_every_algorithm_is_measured_step_by_step(tmp_path: Path) -> None:
    """Each with its file in configs/; the weights of DPO are judged by rollouts."""
    flags = ("--seeds", "5", "--steps", "2", "--output", str(tmp_path), "--port", str(free_port()), "--threads", "1")
    printed = run_benchmark(tmp_path / "printed.log", "benchmarks.algorithms", *flags)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    curves = {curve.algorithm: curve for curve in read_curves(tmp_path / "curves.csv")}
    assert curves.keys() == NAMES.keys()
    for name, curve in curves.items():
        assert curve.seed == 5 and 0.3 < curve.start < 0.9
        assert f"reward {curve.start:.3f} to {curve.end:.3f}" in printed
        points = curve.points
        if name == "dpo":
            assert list(points) == [0, 1, 2] and "loss" not in points[0] and points[2]["loss"] > 0
            assert points[0]["ref_kld"] == 0, "before training the policy is the reference"
            assert points[2]["ref_kld"] > 0, "the judged weights are the trained ones"
        else:
            assert list(points) == [1, 2] and points[2]["ref_kld"] > 0, name
            assert (points[1]["ref_kld"] > 0) == (name in ("gspo", "ppo")), "these update the policy within a step"
            assert all(point["entropy"] > 0 and point["grad_norm"] > 0 for point in points.values())


@pytest.mark.launch
def test_the_model_of_schedules_takes_the_answers_of_a_run(tmp_path: Path) -> None:
    port = ("--inference.server.port", str(free_port()))
    run = succeeded(tmp_path / "run", *port, *SMALL_BATCH, "--max-steps", "3").run_dir.path
    command = [sys.executable, "-m", "benchmarks.schedule", "--like", str(run), "--tokens", "4", "8"]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert re.search(r"^prompts of \d+ tokens, answers of \d+ to \d+, training \d\.\d{3} s a step$", printed, re.M)
    (strict,) = numbers(r"^strict, async_level 1: ([\d,]+) tokens/s$", printed)
    rates = numbers(r"^rounds of \d, async_level 3: ([\d,]+) tokens/s", printed)
    ratios = numbers(r", (\d+\.\d\d) strict / rounds$", printed)
    assert ratios == [pytest.approx(strict / rate, abs=0.011) for rate in rates] and len(ratios) == 2


@pytest.mark.launch
def test_the_constants_of_an_engine_are_fitted_to_its_steps(tmp_path: Path) -> None:
    server = start_server("stub", config_of(MODEL, max_len=512), tmp_path / "server.log").wait_ready()
    command = [sys.executable, "-m", "benchmarks.schedule.calibrate", f"{server.url}/"]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert server.terminate() == 0
    steps, constants = printed.splitlines()
    found = {int(answers): float(ms) / 1e3 for answers, ms in re.findall(r"(\d+) answers: (\S+) ms a step", steps)}
    assert tuple(found) == calibrate.AT_ONCE and all(seconds > 0 for seconds in found.values())
    fit, told = statistics.linear_regression(list(found), list(found.values())), json.loads(constants)
    assert told.keys() == {"base_s", "answer_s", "prefill_s"}
    assert told["answer_s"] == pytest.approx(fit.slope, abs=1e-6) and told["base_s"] == pytest.approx(
        fit.intercept, abs=1e-5
    )


def test_rows_of_a_dataset_like_that_of_the_hub_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is out of reach of tests."""
    import datasets

    rows = {"question": ["6 times 200?", "1 - 2?"], "answer": ["It is <<6*200=1200>>1200.\n#### 1,200", "#### -1"]}
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, part, *, split: rows if (name, part) == ("openai/gsm8k", "main") else None,
    )
    monkeypatch.chdir(tmp_path)
    gsm8k.main()
    for split in ("train", "test"):
        first, second = map(json.loads, Path(f"gsm8k_{split}.jsonl").read_text().splitlines())
        assert first["prompt"].startswith("6 times 200? Let's think") and (first["answer"], second["answer"]) == (
            "1200",
            "-1",
        )
        said = ("#### 7 #### 1,200.", "1200", "#### 1200 #### 2", "####  -1")
        assert [gsm8k.score(text, first["answer"]) for text in said] == [1.0, 0.0, 0.0, 0.0]
        assert gsm8k.score(said[-1], second["answer"]) == 1.0
