"""Evaluations during a run: by one exact version, with one batch, and without a trace in what is trained."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.resolved import makes_same_batches
from holdfast.errors import ConfigError
from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.orchestrator.check import check_environments
from holdfast.orchestrator.evaluation.results import read_identity
from holdfast.orchestrator.evaluation.statistics import summary_in
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from tests.servers.orchestrator_fakes import FakeEngine, make_config, read_rollouts, run, serving

EVAL = {"interval": 2, "num_tasks": 5, "samples_per_task": 2}
STEPS = range(1, 9)
NAME = "eval/reverse_text/avg@2"


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
    with pytest.raises(ConfigError, match="eval.environments: environment 'a': seq_len = 1025 is more than"):
        check(eval={"environments": [{"id": "a", "seq_len": 1025}]})
