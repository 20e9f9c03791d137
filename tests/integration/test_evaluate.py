"""`evaluate` over real servers, and killed."""

import json
import os
import shutil
import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from holdfast.orchestrator.evaluation.results import ROLLOUTS_NAME, EvaluatedRollout
from holdfast.orchestrator.evaluation.statistics import summary_in
from holdfast.process.child import available_cores
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.forking.commands import Run, shared_commands
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.processes import HANG_S, command_line, wait_until
from tests.runs.rl import MODEL, CompletedRun, RlRun, complete

pytestmark = pytest.mark.launch

POLICY = ("--model.name", str(MODEL), "--environments", '[{"id": "reverse_text"}]')
SMALL = ("--num-tasks", "12", "--samples-per-task", "4", "--sampling.max-tokens", "16", "--seq-len", "64")


def start(directory: Path, *flags: str) -> Run:
    return shared_commands().start("evaluate", directory, [*flags, "--output-dir", str(directory)])


def evaluate(directory: Path, *flags: str) -> str:
    return start(directory, *flags).succeed(4 * HANG_S).log


def lines_of(directory: Path) -> list[bytes]:
    path = directory / ROLLOUTS_NAME
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.engine
def test_an_evaluation_starts_vllm_and_ends_it(tmp_path: Path) -> None:
    argv = [*POLICY, *SMALL, "--output-dir", str(tmp_path / "asked")]
    shared_commands().start("evaluate", tmp_path / "asked", argv, engine="vllm").succeed(4 * HANG_S)
    settings = tmp_path / "asked" / "config" / "inference.toml"
    assert f"\nthreads = {available_cores()}\n" in settings.read_text(), "nothing trains beside it"
    assert 0.2 < summary_in(tmp_path / "asked").environments["reverse_text"].estimates["avg@4"].value < 1
    assert not [one for one in psutil.process_iter() if str(tmp_path) in " ".join(command_line(one))]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_harness_plays_is_evaluated_as_any_environment(tmp_path: Path, workers: int) -> None:
    """The harness asks an endpoint of ours: answers and rewards are those of sessions."""
    out = evaluate(tmp_path / "session", *POLICY, *SMALL)
    assert f"evaluating {MODEL}" in out and "avg@4" in out and "pass@4" in out
    found = summary_in(tmp_path / "session").environments["reverse_text"]
    assert found.num_tasks == 12 and 0.2 < found.estimates["avg@4"].value < 1
    harness = {"id": "tests.runs.harness_environments:ReversedOverHttp", "name": "reverse_text", "workers": workers}
    evaluate(tmp_path / "harness", *POLICY[:2], *SMALL, "--environments", json.dumps([harness]))

    def played(directory: Path) -> list[tuple[int, int, float, str]]:
        lines = [msgspec.json.decode(line, type=EvaluatedRollout) for line in lines_of(directory)]
        return sorted((line.task, line.sample, line.reward, line.turns[-1].text) for line in lines)

    assert len(played(tmp_path / "harness")) == 48 and played(tmp_path / "harness") == played(tmp_path / "session")


def test_steps_of_a_run_are_evaluated_and_compared(reference: CompletedRun, tmp_path: Path) -> None:
    """The last step as the run has published it, and an earlier one from its checkpoint."""
    run_dir = RunDir(tmp_path / "run")
    shutil.copytree(reference.run_dir.path, run_dir.path)
    shutil.rmtree(run_dir.weights_of(10))
    run = str(run_dir.path)
    evaluate(tmp_path / "10", "--run", run, "--step", "10", *SMALL)
    evaluate(tmp_path / "last", "--run", run, *SMALL)
    first, last = summary_in(tmp_path / "10"), summary_in(tmp_path / "last")
    assert first.tasks == last.tasks and first.policy["digest"] != last.policy["digest"]
    compared = shared_commands().start(
        "evaluate", tmp_path / "compared", ["--compare", str(tmp_path / "10"), str(tmp_path / "last"), "--json"]
    )
    (line, *_) = json.loads(compared.wait().log)["lines"]
    assert (line["name"], line["num_tasks"]) == ("avg@4", 12)
    assert line["second"]["value"] == last.environments["reverse_text"].estimates["avg@4"].value
    assert 0 < line["paired"]["p_value"] <= 1


def test_an_evaluated_killed_run_ends_the_same(reference: CompletedRun, rl_server: UsedServer, tmp_path: Path) -> None:
    """Its orchestrator dies in an evaluation; every number comes once, and the weights are those of the plain run."""
    flags = (*rl_server.flags, "--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
    asked = ("--eval.interval", "5", "--eval.num-tasks", "24", "--eval.samples-per-task", "2")
    with RlRun(tmp_path / "run", *flags, *asked) as run:
        run.wait_for(lambda: len(lines_of(run.run_dir.evaluation(10))) >= 2, "an evaluation of version 10")
        (orchestrator,) = run.find("holdfast.orchestrator.main")
        orchestrator.kill()
        done = complete(run)
    assert done.exit_code == 0 and "orchestrator was killed by signal 9" in done.output, done.output
    weights = [
        run_dir.weights_of(REFERENCE_STEPS) / "model.safetensors" for run_dir in (run.run_dir, reference.run_dir)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    lines = [line for line in read_metrics(run.run_dir.metrics) if "eval/version" in line]
    # Version 0 makes the first batch; version N makes batch N + 2.
    assert [(line["step"], line["eval/version"]) for line in lines] == [(1, 0), (7, 5), (12, 10), (17, 15)]
    for line in lines:
        summary = summary_in(run.run_dir.evaluation(int(line["eval/version"])))
        value = summary.environments["reverse_text"].estimates["avg@2"].value
        assert line["eval/reverse_text/avg@2"] == pytest.approx(value, rel=1e-7)


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    flags = (
        *POLICY, "--num-tasks", "96", "--samples-per-task", "8", "--sampling.max-tokens", "24",
        "--seq-len", "64", "--max-concurrency", "8",
    )  # fmt: skip
    evaluate(tmp_path / "straight", *flags)
    directory = tmp_path / "killed"
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        before = len(lines_of(directory))
        process = start(directory, *flags)
        _wait_for_lines(directory, before + 16, process)
        os.kill(process.pid, number)
        assert process.wait(4 * HANG_S).code == code, process.log
        assert len(lines_of(directory)) < 96 * 8
    kept = lines_of(directory)
    process = start(directory, *flags)
    _wait_for_lines(directory, len(kept) + 16, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "holdfast.inference.main" in command_line(child):
            child.kill()
            break
    out = process.wait(4 * HANG_S).log
    assert process.code == 0 and "inference died; starting it again" in out, out
    assert "evaluating: 96 tasks, done " in out and lines_of(directory)[: len(kept)] == kept
    assert sorted(lines_of(directory)) == sorted(lines_of(tmp_path / "straight"))
    assert summary_in(directory) == summary_in(tmp_path / "straight")


def _wait_for_lines(directory: Path, number: int, process: Run) -> None:
    wait_until(lambda: len(lines_of(directory)) > number or process.has_ended, f"{number} lines")
