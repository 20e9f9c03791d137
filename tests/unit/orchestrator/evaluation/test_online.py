"""Evaluations during a run: by one exact version, with one batch, and without a trace in what is trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.commands.resume.superseded import set_aside_after
from holdfast.orchestrator.check_environments import check_environments
from holdfast.orchestrator.evaluation.results import read_identity
from holdfast.orchestrator.evaluation.summary import summary_in
from holdfast.orchestrator.main import orchestrate
from holdfast.shared.config.fingerprint import makes_same_batches
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.files import journal
from holdfast.shared.files.run_dir import RunDir
from tests.runs.processes import command_line
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, read_rollouts, serving

EVAL = {"interval": 2, "num_tasks": 5, "samples_per_task": 2}
STEPS = range(1, 9)
NAME = "eval/reverse_text/avg@2"


def run(config: OrchestratorConfig) -> None:
    run_dir = RunDir(config.output_dir)
    with FakeTrainer(run_dir, start=0, max_steps=config.max_steps):
        asyncio.run(orchestrate(config))


def metrics_of(run_dir: RunDir) -> dict[int, dict[str, float]]:
    """The numbers of evaluations, by the batch that they came with."""
    found = {step: journal.read_batch(run_dir, step).metrics for step in STEPS}
    chosen = {
        step: {name: value for name, value in metrics.items() if name.startswith("eval/")}
        for step, metrics in found.items()
    }
    return {step: metrics for step, metrics in chosen.items() if metrics}


def held_out(engine: FakeEngine, config: OrchestratorConfig) -> list[tuple[tuple[int, ...], int]]:
    """Every prompt with a seed that was asked for a group of the size of an evaluation's."""
    return [
        (tuple(body["token_ids"]), seed)
        for body in engine.requests
        for seed in body["seeds"]
        if len(body["seeds"]) != config.group_size
    ]


def test_every_other_version_is_evaluated_once_and_training_is_as_without(tmp_path: Path) -> None:
    plain, engine = FakeEngine(), FakeEngine()
    with serving(plain, engine):
        run(make_config(tmp_path / "plain", plain))
        config = make_config(tmp_path / "run", engine, eval=EVAL)
        run(config)
    run_dir = RunDir(tmp_path / "run")
    assert read_rollouts(run_dir, STEPS) == read_rollouts(RunDir(tmp_path / "plain"), STEPS)
    found = metrics_of(run_dir)
    assert {step: metrics["eval/version"] for step, metrics in found.items()} == {1: 0, 4: 2, 6: 4, 8: 6}
    for step, version in ((1, 0), (4, 2), (6, 4), (8, 6)):
        directory = run_dir.evaluation(version)
        weights = journal.read_batch(run_dir, step).weights_digest
        assert read_identity(directory)["policy"] == {"kind": "weights", "digest": weights, "version": version}
        assert found[step][NAME] == summary_in(directory).environments["reverse_text"].estimates["avg@2"].value
        assert journal.read_batch(run_dir, step).metrics["time/evaluate"] > 0
    assert len({metrics[NAME] for metrics in found.values()}) > 1, "the versions differ"
    asked = held_out(engine, config)
    assert len(asked) == 4 * 5 * 2 and len(set(asked)) == 5 * 2, "the same tasks and seeds for every version"


@pytest.mark.launch
def test_workers_evaluate_as_the_orchestrator_does_and_are_gone_in_between(tmp_path: Path) -> None:
    here, there = FakeEngine(), FakeEngine()
    seen: list[bool] = []

    def look(number: int) -> None:
        processes = psutil.Process().children(recursive=True)
        seen.append(any("worker_process" in "".join(command_line(one)) for one in processes))

    there.on_generate = look
    section = {"id": "reverse_text"}
    with serving(here, there):
        run(make_config(tmp_path / "here", here, eval=EVAL))
        run(make_config(tmp_path / "there", there, eval=EVAL | {"environments": [section | {"workers": 1}]}))
    directories = RunDir(tmp_path / "here"), RunDir(tmp_path / "there")
    assert metrics_of(directories[0]) == metrics_of(directories[1])
    assert read_rollouts(directories[0], STEPS) == read_rollouts(directories[1], STEPS)
    in_evaluations = [len(body["seeds"]) == 2 for body in there.requests]
    assert seen == in_evaluations and any(seen) and not all(seen)


@pytest.mark.parametrize("request_number", [5, 20])
def test_an_evaluation_that_was_cut_off_comes_once_with_the_same_numbers(request_number: int, tmp_path: Path) -> None:
    """Request 5 is of the evaluation of version 0: the batch before it has three; 20 is of that of version 2."""
    straight, engine = FakeEngine(), FakeEngine()
    with serving(straight, engine):
        run(make_config(tmp_path / "straight", straight, eval=EVAL))
        config = make_config(tmp_path / "run", engine, eval=EVAL)
        config.client.max_concurrency = 4

        async def cut_off() -> None:
            work = asyncio.ensure_future(orchestrate(config))
            loop = asyncio.get_running_loop()
            engine.on_generate = lambda number: number == request_number and loop.call_soon_threadsafe(work.cancel)
            with pytest.raises(asyncio.CancelledError):
                await work

        with FakeTrainer(RunDir(config.output_dir), start=0, max_steps=config.max_steps):
            asyncio.run(cut_off())
            assert len(engine.requests[request_number - 1]["seeds"]) == 2, "it was cut off in an evaluation"
            asyncio.run(orchestrate(config))
    run_dir = RunDir(tmp_path / "run")
    assert metrics_of(run_dir) == metrics_of(RunDir(tmp_path / "straight"))
    assert read_rollouts(run_dir, STEPS) == read_rollouts(RunDir(tmp_path / "straight"), STEPS)
    # What was in flight was not kept: at most as many requests as may be at once.
    assert len(held_out(engine, config)) - len(held_out(straight, config)) <= 4


def test_what_is_there_of_other_weights_is_evaluated_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    with serving(engine):
        config = make_config(tmp_path / "run", engine, eval=EVAL)
        run_dir = RunDir(config.output_dir)
        directory = run_dir.evaluation(2)
        directory.mkdir(parents=True)
        (directory / "evaluation.json").write_text('{"format": 1, "policy": "another"}')
        (directory / "rollouts.jsonl").write_text("nothing of this policy\n")
        run(config)
    assert "evaluated anew" in caplog.text
    assert summary_in(directory).metrics()[NAME] == metrics_of(run_dir)[4][NAME]


def test_evaluations_of_later_versions_are_set_aside_with_their_batches(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for version in (0, 2, 4):
        run_dir.evaluation(version).mkdir(parents=True)
    assert set_aside_after(run_dir, 1, 1, last_batch=3) == [run_dir.discarded(1) / "evaluations" / "step_4"]
    assert set_aside_after(run_dir, 1, 2) == [run_dir.discarded(2) / "evaluations" / "step_2"]
    assert run_dir.evaluation(0).exists()
    run_dir.remove_run()
    assert not run_dir.evaluations.exists()


def test_evaluations_change_no_batch() -> None:
    assert makes_same_batches(OrchestratorConfig(), OrchestratorConfig.model_validate({"eval": EVAL}))


def test_what_cannot_be_evaluated_is_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    section = {"id": "jsonl", "args": {"path": str(rows)}}

    def check(**changes: Any) -> None:
        check_environments(OrchestratorConfig.model_validate({"eval": EVAL} | changes))

    check()
    check(eval=EVAL | {"environments": [section], "num_tasks": 3})
    own = {"id": "tests.unit.orchestrator.evaluation.test_evaluator:Letters"}
    check(eval=EVAL | {"environments": [own]})
    with pytest.raises(ConfigError, match=r"eval.environments: 'jsonl' has 3 tasks, and training draws them all"):
        check(environments=[section], eval={})
    with pytest.raises(ConfigError, match=r"eval.num_tasks = 5, and environment 'jsonl' has 3 tasks"):
        check(eval=EVAL | {"environments": [section]})
    with pytest.raises(ConfigError, match=r"eval.environments\[0\].id: there is no environment 'jsnl'"):
        check(eval={"environments": [{"id": "jsnl"}]})
    teacher = {"urls": ["http://a"], "model": "b", "mode": "samples"}
    with pytest.raises(ValueError, match="leave eval out, and evaluate checkpoints with"):
        check(teacher=teacher)
    with pytest.raises(ValueError, match="environments need distinct names"):
        check(eval={"environments": [own, own]})
    with pytest.raises(ValueError, match="are 2 times the same answer"):
        check(eval=EVAL | {"sampling": {"temperature": 0}})
    with pytest.raises(ConfigError, match="eval.environments: environment 'reverse_text': seq_len = 1025 is more than"):
        check(eval={"environments": [{"seq_len": 1025}]})
