"""Which steps of a run are evaluated while it trains, by whom, and what is refused."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import OrchestratorConfig, SftConfig, program_config
from holdfast.config.base import ModelConfig
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.load import read_toml
from holdfast.errors import ConfigError, DataError, ProcessDied
from holdfast.launcher.devices import evaluation_gpus, place_training
from holdfast.launcher.evaluation import follow as evaluate_follow
from holdfast.launcher.evaluation import policy as evaluated_policy
from holdfast.launcher.evaluation.follow import FollowedRun
from holdfast.launcher.evaluation.policy import name_of_export, prepare_directory, run_evaluation, write_settings
from holdfast.launcher.launch import with_evaluations
from holdfast.launcher.plan import Plan
from holdfast.launcher.preflight import check_evaluations
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.supervisor import Supervisor
from holdfast.orchestrator.evaluation.main import load_tasks
from holdfast.orchestrator.evaluation.results import IDENTITY_NAME, ROLLOUTS_NAME, claim_directory
from holdfast.run.atomic import TEMPORARY_PREFIX
from holdfast.run.manifest import library_versions, verify
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings
from holdfast.view.console import as_json_lines
from holdfast.view.follow import ObservedRun
from tests.builders.attempts import write_settings as write_settings_of_run
from tests.builders.checkpoint_files import flip, write_checkpoint
from tests.builders.evaluations import evaluated
from tests.builders.toy import DATA, ENVIRONMENTS, MODEL, TOY
from tests.unit.conftest import Command
from tests.unit.launcher.test_placement import machine

EVAL = {"interval": 4, "environments": ENVIRONMENTS}


def run_of(path: Path, *steps: int, program: str = "sft", attempt: int = 1, **settings: Any) -> RunDir:
    """Return a run with checkpoints of `steps`, which trains until step 10 unless `settings` say otherwise."""
    run_dir = RunDir(path)
    run_dir.create()
    config = program_config(program).model_validate({"max_steps": 10, "model": {"name": MODEL}} | settings)
    write_settings_of_run(run_dir, "trainer" if program == "rl" else program, config, attempt=attempt)
    for step in steps:
        write_checkpoint(run_dir, step)
    return run_dir


def finishes(run_dir: RunDir) -> Callable[..., int]:
    """Return what stands for the evaluation of a step of `run_dir`."""

    def run(_: EvaluateConfig, directory: RunDir, __: object) -> int:
        shutil.rmtree(directory.path)
        evaluated(run_dir, int(directory.path.name.removeprefix("step_")))
        return 0

    return run


def test_due_are_the_beginning_every_interval_and_the_end(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", 2, 4, 6, 8, 10)
    run = FollowedRun.read(run_dir.path)
    assert run.due(4) == [0, 4, 8, 10] and run.due(None) == [0, 2, 4, 6, 8, 10]
    assert run.base is not None and run.base.name == MODEL
    run_of(tmp_path / "run", attempt=2, max_steps=20)
    assert FollowedRun.read(run_dir.path).due(4) == [0, 4, 8], "the newest attempt goes further"
    for number, changes in enumerate(({"model": {"name": MODEL, "init": "random"}}, {"ckpt": {"init_from": MODEL}})):
        assert FollowedRun.read(run_of(tmp_path / str(number), 10, **changes).path).due(5) == [10]
    # What resumes says nothing of the beginning; another fresh start does.
    resumed = {"ckpt": {"resume_step": 2}}
    elsewhere = run_of(tmp_path / "elsewhere", 10, ckpt={"init_from": MODEL})
    run_of(elsewhere.path, attempt=2, **resumed)
    assert FollowedRun.read(elsewhere.path).due(5) == [10]
    run_of(elsewhere.path, attempt=3)
    assert FollowedRun.read(elsewhere.path).due(5) == [0, 10]
    assert FollowedRun.read(run_of(tmp_path / "forked", 10, **resumed).path).due(5) == [10]


def test_an_old_attempt_may_go_while_settings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_of(tmp_path / "run", 4)
    run_of(run_dir.path, attempt=2)

    def removing(path: Path) -> dict[str, Any]:
        if path.parent == run_dir.configs(1):
            run_dir.remove_old_attempts(1)
        return read_settings(path)

    monkeypatch.setattr("holdfast.run.settings.read_settings", removing)
    assert FollowedRun.read(run_dir.path).max_steps == 10 and not run_dir.configs(1).exists()


def test_a_run_is_over_when_its_last_step_is_there_or_nobody_trains(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", 4)
    assert FollowedRun.read(run_dir.path).is_over(), "nobody trains"
    run_dir.lock()
    assert not FollowedRun.read(run_dir.path).is_over()
    write_checkpoint(run_dir, 10)
    assert FollowedRun.read(run_dir.path).is_over()


def test_what_cannot_be_followed_is_refused(tmp_path: Path, run_command: Command) -> None:
    with pytest.raises(ConfigError, match="holds no run: it has no run.json"):
        FollowedRun.read(tmp_path)
    empty = RunDir(tmp_path / "empty")
    empty.path.mkdir()
    empty.create()
    with pytest.raises(DataError, match="has no settings of a run"):
        FollowedRun.read(empty.path)
    with pytest.raises(DataError, match="trains a reward model"):
        FollowedRun.read(run_of(tmp_path / "rewards", program="reward-model").path)
    own = run_of(tmp_path / "own", 10, program="rl")
    asked = OrchestratorConfig.model_validate({"eval": {}, "environments": ENVIRONMENTS})
    write_settings_of_run(own, "orchestrator", asked)
    code, _, err = run_command("evaluate", "--run", own.path, "--follow")
    assert code == 2 and "evaluates itself (eval)" in err


@pytest.mark.launch
def test_a_dry_run_names_the_steps_that_are_missing(run_command: Command, tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", 5, 10)
    evaluated = run_dir.evaluation(5)
    evaluated.mkdir(parents=True)
    (evaluated / "summary.json").write_text("{}")
    asked = ("--environments", json.dumps(ENVIRONMENTS))
    flags = ("evaluate", "--run", run_dir.path, *asked, "--follow", "--interval", "5")
    code, out, _ = run_command(*flags, "--dry-run")
    assert code == 0 and f"would evaluate steps 0, 10 of {run_dir.path} in {run_dir.evaluations}" in out
    assert evaluate_follow._listed([]) == "no step that is there now"
    for step in (0, 10):
        run_dir.evaluation(step).mkdir()
        (run_dir.evaluation(step) / "summary.json").write_text("{}")
    code, out, _ = run_command(*flags)
    assert code == 0 and f"every step that was to be evaluated is; the results are in {run_dir.evaluations}" in out
    # Two never write into one place; this process is the first one of them still.
    code, _, err = run_command(*flags)
    assert code == 2 and f"{run_dir.evaluations} is in use by another run" in err
    code, _, err = run_command("evaluate", "--model.name", MODEL, *asked, "--output-dir", run_dir.evaluation(15))
    assert code == 2 and f"{run_dir.evaluations} is written by `evaluate --follow`" in err
    assert not run_dir.evaluation(15).exists(), "whoever follows would end by its lock"
    RunDir(run_dir.evaluation(5)).lock()
    half = run_dir.evaluation(5) / f"{TEMPORARY_PREFIX}model_step_5_ab-1"
    half.touch()
    evaluate_follow._clear_leftovers(run_dir.evaluations)
    assert half.exists()


def test_others_work_is_waited_for(run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_of(tmp_path / "run", 5, model={"name": MODEL, "init": "random"})
    RunDir(run_dir.evaluation(5)).lock()
    looks: list[float] = []

    def pause(_: Supervisor, seconds: float, __: object) -> int | None:
        looks.append(seconds)
        if len(looks) == 2:
            (run_dir.evaluation(5) / "summary.json").write_text("{}")
        return None

    monkeypatch.setattr(Supervisor, "pause", pause)
    flags = ("--environments", json.dumps(ENVIRONMENTS), "--follow")
    code, out, _ = run_command("evaluate", "--run", run_dir.path, *flags)
    said = f"{run_dir.evaluation(5)} is evaluated by another `evaluate`, which is waited for\n"
    assert code == 0 and out.count(said) == 1 and len(looks) == 2
    other = run_of(tmp_path / "other", 5, model={"name": MODEL, "init": "random"})
    RunDir(other.evaluation(5)).lock()
    monkeypatch.setattr(Supervisor, "pause", lambda *_: signal.SIGTERM)
    assert run_command("evaluate", "--run", other.path, *flags)[0] == 128 + signal.SIGTERM


def test_a_damaged_step_hinders_no_other(run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_of(tmp_path / "run", 5, 10, model={"name": MODEL, "init": "random"})
    damaged = run_dir.checkpoint(5) / "a_first.txt"
    flip(damaged)

    def weights(_: Path, step: int, path: Path, **__: bool) -> Path:
        verify(run_dir.checkpoint(step))
        return path / name_of_export(run_dir, step)

    monkeypatch.setattr(evaluated_policy, "weights_of_step", weights)
    monkeypatch.setattr(evaluated_policy, "run_evaluation", finishes(run_dir))
    flags = ("--environments", json.dumps(ENVIRONMENTS), "--follow")
    code, out, err = run_command("evaluate", "--run", run_dir.path, *flags)
    assert run_dir.is_evaluated(10) and f"WARNING: step 5 is not evaluated: {damaged} is damaged" in out
    assert code == 2 and f"step 5 is not evaluated: {damaged} is damaged" in err


def test_what_was_exported_for_an_evaluation_goes_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_of(tmp_path / "run", 5)
    exported, codes = run_dir.evaluation(5) / "model_step_5_ab", [7, 0]

    def weights(*_: object) -> Path:
        exported.mkdir(exist_ok=True)
        return exported

    def ends(_: object, directory: RunDir, *__: object, **___: object) -> int:
        (directory.path / "summary.json").write_bytes(summary)
        return codes.pop(0)

    evaluated(RunDir(tmp_path / "other"), 5)
    summary = (RunDir(tmp_path / "other").evaluation(5) / "summary.json").read_bytes()
    monkeypatch.setattr(RunDir, "lock", lambda _: None)  # this process keeps it
    monkeypatch.setattr(evaluated_policy, "check_servable", lambda _: None)
    monkeypatch.setattr(evaluated_policy, "weights_of_step", weights)
    monkeypatch.setattr(evaluated_policy, "run_evaluation", ends)
    config = EvaluateConfig(run=run_dir.path, step=5, output_dir=run_dir.evaluation(5))
    assert evaluated_policy.evaluate(config) == 7 and exported.exists(), "the same command continues with it"
    assert evaluated_policy.evaluate(config) == 0 and not exported.exists()


def test_what_was_begun_with_other_weights_of_the_step_is_evaluated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: EvaluateConfig, directory: RunDir, _: object) -> int:
        write_settings(config, directory.path / "config")
        return 7

    def weights(_: Path, step: int, path: Path, **__: bool) -> Path:
        return path / name_of_export(run, step)

    monkeypatch.setattr(evaluated_policy, "weights_of_step", weights)
    monkeypatch.setattr(evaluated_policy, "run_evaluation", fails)
    run = run_of(tmp_path / "run", 5)
    config = EvaluateConfig(run=run.path, follow=True, output_dir=tmp_path / "elsewhere")
    answers = config.output_dir / "step_5" / ROLLOUTS_NAME

    def goes_on() -> bool:
        """Evaluate the step, whose process fails; return whether the answers of before are there."""
        code = evaluate_follow._evaluate_step(config, FollowedRun.read(run.path), 5, supervisor=None)  # pyright: ignore[reportArgumentType] - nothing is started
        assert code == 7
        before = answers.exists()
        claim_directory(answers.parent, {"libraries": library_versions(), "environments": {}})
        answers.touch()
        return before

    assert not goes_on() and goes_on()
    shutil.rmtree(run.checkpoint(5))
    write_checkpoint(run, 5, content="trained again")
    assert not goes_on() and goes_on()
    assert "step_5 was begun with other weights: evaluating it again" in capsys.readouterr().out
    for dtype in ("bfloat16", "float32"):
        config.inference.model.dtype = dtype
        assert not goes_on() and goes_on()
    config.inference.engine.args = {"quantization": "fp8"}
    assert not goes_on() and goes_on()
    config.inference.model.dtype = None  # the device decides
    choose = lambda inference, _: setattr(inference.model, "dtype", "bfloat16")  # noqa: E731
    monkeypatch.setattr(evaluate_follow, "choose_inference", choose)
    assert not goes_on() and goes_on()
    config.inference.model.fp32_lm_head = True
    assert not goes_on() and goes_on()


def test_other_files_tasks_or_versions_are_evaluated_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, data = RunDir(tmp_path / "step_5"), tmp_path / "tasks.jsonl"
    environments = [{"id": "jsonl", "args": {"path": str(data)}}]
    place = {"run": tmp_path, "output_dir": directory.path}
    config = EvaluateConfig.model_validate(place | {"environments": environments})
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    for change in (
        lambda: data.write_text("other"),
        lambda: (directory.path / IDENTITY_NAME).write_text('{"format": 1}'),
        lambda: (directory.path / IDENTITY_NAME).rename(directory.path / ROLLOUTS_NAME),
        lambda: monkeypatch.setattr(evaluate_follow, "library_versions", lambda: {"vllm": "another"}),
        lambda: setattr(config, "num_tasks", 5),
    ):
        evaluate_follow._clear_other_evaluation(config, directory)
        prepare_directory(config, directory)
        evaluate_follow._clear_other_evaluation(config, directory)
        assert directory.path.exists(), "no task was played yet"
        claim_directory(directory.path, load_tasks(config, {}).identity({}))
        evaluate_follow._clear_other_evaluation(config.model_copy(update={"max_concurrency": 3}), directory)
        assert directory.path.exists()
        change()
        evaluate_follow._clear_other_evaluation(config, directory)
        assert not directory.path.exists()
        data.write_text('{"prompt": "a", "answer": "b"}\n')
        monkeypatch.undo()


def test_elsewhere_a_step_trained_again_is_evaluated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = run_of(tmp_path / "run", 5, 10)
    config = EvaluateConfig(run=run_dir.path, follow=True, output_dir=tmp_path / "elsewhere")
    run = FollowedRun.read(run_dir.path)
    for step in (0, 5, 10):
        served = str(tmp_path / name_of_export(run_dir, step)) if step else str(MODEL)
        settings = config.model_copy(deep=True)
        settings.inference.model.name = served
        write_settings(settings, config.output_dir / f"step_{step}" / "config")
        (config.output_dir / f"step_{step}" / "summary.json").write_text("{}")
    assert evaluate_follow._missing(config, run) == []
    other = replace(run, base=ModelConfig(name="other"))
    assert evaluate_follow._missing(config, other) == [0], "the run began again with another model"
    shutil.rmtree(run_dir.checkpoint(10))
    assert evaluate_follow._is_done(config, run, 10), "nobody can evaluate it any more"
    write_checkpoint(run_dir, 10, content="trained again")
    assert evaluate_follow._missing(config, run) == [10]
    settings = config.output_dir / "step_5" / "config" / "evaluate.toml"
    settings.write_bytes(settings.read_bytes()[:-5])
    assert evaluate_follow._missing(config, run) == [5, 10], "its settings are damaged"
    settings.unlink()
    assert evaluate_follow._missing(config, run) == [5, 10], "nobody knows of which weights it is"
    # In the run's own directory a resume has set aside what is not of these weights.
    run_dir.evaluations.mkdir()
    for step in (0, 5, 10):
        (config.output_dir / f"step_{step}").rename(run_dir.evaluation(step))
    assert evaluate_follow._missing(config.model_copy(update={"output_dir": run_dir.evaluations}), run) == []
    run_dir.evaluation(10).rename(config.output_dir / "step_10")
    shutil.rmtree(run_dir.checkpoint(10))
    # Gone between the look and the evaluation: what was of other weights goes all the same.
    assert evaluate_follow._evaluate_step(config, run, 10, supervisor=None) == 0  # pyright: ignore[reportArgumentType] - nothing is started
    said = capsys.readouterr().out
    assert "step_10 is not of the weights that step 10 has now, or damaged: evaluating it again" in said
    assert "step 10 is not evaluated: its checkpoint went away" in said
    assert not (config.output_dir / "step_10").exists()


def evaluated_sft(**changes: Any) -> SftConfig:
    values = {"model": {"name": MODEL}, "data": {"name": DATA}, "ckpt": {"interval": 2}, "eval": EVAL}
    return SftConfig.model_validate(values | changes)


def test_what_is_trained_on_is_not_asked(tmp_path: Path) -> None:
    rows = tmp_path / "rows" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    asks = {"interval": 4, "environments": [{"id": "jsonl", "args": {"path": str(rows)}}]}
    check_evaluations(evaluated_sft(eval=asks))
    for name in (rows, rows.parent):
        with pytest.raises(ConfigError, match=r"'jsonl' asks what is in .*rows.jsonl, and that is trained on"):
            check_evaluations(evaluated_sft(eval=asks, data={"name": str(name)}))
    check_evaluations(evaluated_sft(eval=None))
    nodes = evaluated_sft()
    nodes.parallel.nodes = 2  # as an outer launcher has it
    with pytest.raises(ConfigError, match="several nodes"):
        check_evaluations(nodes)


def test_evaluations_get_the_gpus_that_the_trainer_leaves() -> None:
    config = evaluated_sft(parallel={"num_ranks": 1})
    (gpu,) = evaluation_gpus(config, place_training(config.parallel, machine(3)), machine(3))
    assert gpu.name == "1"
    greedy = evaluated_sft()
    with pytest.raises(ConfigError, match=r"needs 1 of the 2 GPUs, and the trainer leaves 0: lower parallel.num_ranks"):
        evaluation_gpus(greedy, place_training(greedy.parallel, machine(2)), machine(2))
    on_cpu = machine(2, engine="cpu")
    with pytest.raises(ConfigError, match="To sample on the CPU all the same: --eval.inference.engine.device cpu"):
        evaluation_gpus(greedy, place_training(greedy.parallel, on_cpu), on_cpu)
    greedy = evaluated_sft(eval=EVAL | {"inference": {"engine": {"device": "cpu"}}})
    assert evaluation_gpus(greedy, place_training(greedy.parallel, on_cpu), on_cpu) == ()


def test_the_plan_of_a_run_shows_what_evaluates_it(run_command: Command, tmp_path: Path) -> None:
    flags = (*TOY["sft"], "--output-dir", tmp_path / "run", "--dry-run")
    code, out, _ = run_command("sft", *flags, "--ckpt.interval", "2", "--eval", json.dumps(EVAL | {"num_tasks": 3}))
    assert code == 0 and any(line.split()[0] == "evaluation" for line in out.splitlines() if line.split())
    written = read_toml(EvaluateConfig, tmp_path / "run" / "configs" / "dry_run" / "evaluation.toml")
    assert (written.follow, written.interval, written.num_tasks) == (True, 4, 3)
    assert (written.run, written.output_dir) == (tmp_path / "run", tmp_path / "run" / "evaluations")
    code, out, _ = run_command("sft", *flags)
    assert code == 0 and "evaluation" not in out


def test_the_next_attempt_evaluates_where_one_gave_up(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run")
    run_dir.give_up_evaluations()
    for changes in ({"dry_run": True}, {"eval": None}, {}):
        config = evaluated_sft(output_dir=run_dir.path, **changes)
        assert run_dir.given_up.exists()
        attempt = Attempt(run_dir, 2, None)
        plan = Plan(attempt, {}, config, [])
        with_evaluations(plan, attempt, config, place_training(config.parallel, machine(2)), ())
    assert not run_dir.given_up.exists()


def test_how_evaluations_end_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_signals: None) -> None:
    directory = RunDir(tmp_path / "step_5")
    config = EvaluateConfig(model=ModelConfig(name="m"), output_dir=directory.path)
    prepare_directory(config, directory)
    observed = ObservedRun(directory, "step_5")
    done = f"import pathlib; pathlib.Path({str(directory.path / 'summary.json')!r}).touch()"
    for code, status in (("raise SystemExit(2)", "failed"), (done, "finished")):
        monkeypatch.setattr(evaluated_policy, "module_command", lambda *_, code=code: [sys.executable, "-c", code])
        with Supervisor() as supervisor:
            if status == "failed":
                with pytest.raises(ProcessDied):
                    run_evaluation(config, directory, supervisor)
            else:
                assert run_evaluation(config, directory, supervisor) == 0
            assert supervisor.children == []
        observed.look()
        assert observed.status == status
    events = [json.loads(line) for line in (directory.path / "logs" / "events.jsonl").read_text().splitlines()]
    told = [(one["phase"], one.get("exit_code")) for one in events if one["process"] == "launcher"]
    assert told == [("starting", None), ("ended", 2), ("starting", None), ("ended", 0)]


def test_results_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = run_of(tmp_path / "run")
    config = EvaluateConfig(run=run_dir.path, follow=True, output_dir=run_dir.evaluations)
    monkeypatch.setattr(evaluated_policy, "run_evaluation", finishes(run_dir))
    with as_json_lines() as lines:
        code = evaluate_follow._evaluate_step(config, FollowedRun.read(run_dir.path), 0, supervisor=None)  # pyright: ignore[reportArgumentType] - nothing is started
        lines.close_with(code)
    *_, result, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (result["type"], result["step"], end["exit_code"]) == ("result", 0, 0)
    assert result["summary"]["policy"] == {"kind": "weights"}
