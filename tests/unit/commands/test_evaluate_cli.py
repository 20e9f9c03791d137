"""The command `evaluate` up to where it starts something, and what it shows of results."""

import json
import shutil
from pathlib import Path

import pytest

from holdfast.config.environments import EnvironmentConfig, SamplingConfig
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import CheckpointError, ConfigError, printable
from holdfast.launcher.evaluation import policy as evaluated_policy
from holdfast.launcher.evaluation.policy import prepare_directory
from holdfast.orchestrator.evaluation.results import EvaluatedRollout, claim_directory, line_of
from holdfast.orchestrator.evaluation.statistics import read_evaluation
from holdfast.run.manifest import file_digest
from holdfast.run.run_dir import RunDir
from tests.builders.attempts import write_settings
from tests.builders.checkpoint_files import commit, write_checkpoint
from tests.conftest import ROOT
from tests.servers.orchestrator_fakes import FakeEngine, publish_weights, serving
from tests.unit.conftest import Command, Refused
from tests.unit.orchestrator.evaluation.test_evaluator import LETTERS, config_of, evaluated

MODEL = str(ROOT / "examples" / "reverse_text" / "model")
ENVIRONMENTS = '[{"id": "reverse_text"}]'
POLICY = ("--model.name", MODEL, "--environments", ENVIRONMENTS)


def run_with_weights(path: Path, *versions: int) -> RunDir:
    run_dir = RunDir(path)
    for version in versions:
        publish_weights(run_dir, version, b"weights")
    return run_dir


@pytest.mark.launch
def test_a_dry_run_says_what_would_be_evaluated(run_command: Command, tmp_path: Path) -> None:
    flags = ("--environments", ENVIRONMENTS, "--output-dir", tmp_path / "evaluation", "--dry-run")
    code, out, _ = run_command("evaluate", "--model.name", MODEL, *flags)
    assert code == 0 and f"would evaluate {MODEL} in {tmp_path / 'evaluation'}" in out
    assert EvaluateConfig.model_validate({"inference": {"dry_run": True}}).dry_run
    run_dir = run_with_weights(tmp_path / "run", 4)
    code, out, _ = run_command("evaluate", "--run", run_dir.path, "--step", "latest", *flags)
    assert code == 0 and f"would evaluate step 4 of {run_dir.path}" in out
    assert not (tmp_path / "evaluation" / "run.json").exists()
    run_with_weights(run_dir.path, 0)
    unfinished = EvaluateConfig.model_validate({"run": run_dir.path, "step": 0, "output_dir": tmp_path / "evaluation"})
    prepare_directory(unfinished, RunDir(tmp_path / "evaluation"))
    code, out, _ = run_command("evaluate", "--run", run_dir.path, *flags)
    assert code == 0 and f"would evaluate step 0 of {run_dir.path}" in out


@pytest.mark.parametrize(("flags", "said"), [
    ((), "evaluate needs model.name or run and environments"), (("--model.name", MODEL), "environments is needed"),
    ((*POLICY, "--run", "a"), "evaluate takes one policy"),
    (("--model.name", "./nowhere", "--environments", ENVIRONMENTS), "model.name = './nowhere' is not a directory"),
    ((*POLICY, "--seq-len", "64", "--inference.model.max-len", "32"), "max_len = 32"),
    ((*POLICY, "--seq-len", "4096"), "inference.model.max_len = 4096 is more than the 2048"),
    ((*POLICY, "--inference.model.load", "dummy"), "inference.model.load = 'dummy': the server of an evaluation"),
    ((*POLICY, "--inference.model.name", "other"), "inference.model.name = 'other': the server of an evaluation"),
    ((*POLICY, "--inference.model.tokenizer", "other"), "inference.model.tokenizer is that of model.tok"),
    (("--run", ""), "flag --run must not be empty"),
    ((*POLICY, "--inference.engines", "2"), "inference.engines = 2: an evaluation has one server"),
    (("--model.name", MODEL, "--environments", '[{"id": "revers_text"}]'), "Did you mean 'reverse_text'"),
    (("--run", "nowhere"), "there is no directory nowhere (from "), (("--compare", "a"), "expected 2 arguments"),
    (("--compare", "a", "b"), "a holds no evaluation"),
    (("--compare", "a", "b", "--confidence", "2"), "--confidence 2 is not between 0.5 and 1"),
    (("--compare", "a", "b", "--answers", "-1"), "--answers -1 is below 0"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_starts(
    flags: tuple[str, ...], said: str, refused: Refused, in_tmp_path: Path
) -> None:
    assert said in refused("evaluate", *flags) and not (in_tmp_path / "evaluation").exists()


def test_a_run_is_not_taken_for_an_evaluation(refused: Refused, tmp_path: Path) -> None:
    said = refused("evaluate", *POLICY, "--output-dir", run_with_weights(tmp_path / "run", 1).path)
    assert "holds a run. An evaluation needs a directory of its own" in said


def test_clean_removes_what_an_evaluation_made_and_nothing_else(tmp_path: Path) -> None:
    config = EvaluateConfig.model_validate({"model": {"name": MODEL}, "output_dir": tmp_path})
    directory = RunDir(tmp_path)
    prepare_directory(config, directory)
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model_step_3").mkdir()
    run_id = directory.run_id()
    prepare_directory(config, directory)
    assert (tmp_path / "rollouts.jsonl").exists() and directory.run_id() == run_id
    prepare_directory(config.model_copy(update={"clean": True}), directory)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config", "notes.txt", "run.json"] and directory.run_id() != run_id


def test_clean_leaves_a_directory_alone_that_holds_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.toml").write_text("mine")
    config = EvaluateConfig.model_validate({"model": {"name": MODEL}, "output_dir": tmp_path, "clean": True})
    prepare_directory(config, RunDir(tmp_path))
    assert (tmp_path / "config" / "mine.toml").read_text() == "mine"


def test_a_step_of_a_run_is_found(tmp_path: Path) -> None:
    run_dir, step_of_run = run_with_weights(tmp_path / "run", 3, 5), evaluated_policy.step_of_run
    assert step_of_run(run_dir.path, "latest") == 5
    weights = evaluated_policy.weights_of_step(run_dir.path, step_of_run(run_dir.path, 3), tmp_path)
    assert weights == run_dir.weights_of(3)
    with pytest.raises(CheckpointError, match="step = 4 .* checkpoints of no step, and whole weights of steps 3, 5"):
        step_of_run(run_dir.path, 4)
    shutil.rmtree(run_dir.weights)
    with pytest.raises(CheckpointError, match="step = latest .* whole weights of no step"):
        step_of_run(run_dir.path, "latest")
    with pytest.raises(ConfigError, match="holds no run: it has no run.json"):
        step_of_run(tmp_path, "latest")


def test_the_latest_step_is_that_of_the_evaluation_that_was_not_finished(tmp_path: Path) -> None:
    run_dir, directory = run_with_weights(tmp_path / "run", 3), RunDir(tmp_path / "evaluation")
    asked = EvaluateConfig.model_validate({"run": run_dir.path, "output_dir": directory.path})
    assert evaluated_policy.unfinished_step(asked, directory) is None
    prepare_directory(asked.model_copy(update={"step": 3}), directory)
    publish_weights(run_dir, 5, b"weights")
    assert evaluated_policy.unfinished_step(asked, directory) == 3
    for others in ({"step": 5}, {"clean": True}, {"run": tmp_path}):
        assert evaluated_policy.unfinished_step(asked.model_copy(update=others), directory) is None
    shutil.rmtree(run_dir.weights_of(3))
    assert evaluated_policy.unfinished_step(asked, directory) is None
    publish_weights(run_dir, 3, b"weights")
    claim_directory(directory.path, {"samples_per_task": 1, "environments": {"a": {"num_tasks": 1}}})
    rollouts = directory.path / "rollouts.jsonl"
    rollouts.write_bytes(line_of(EvaluatedRollout(environment="a", task=0)))
    (directory.path / "summary.json").write_text("{}")
    assert evaluated_policy.unfinished_step(asked, directory) is None
    rollouts.write_bytes(b"x" + rollouts.read_bytes())
    assert evaluated_policy.unfinished_step(asked, directory) == 3, "its damaged task is played again"


def test_an_export_of_an_earlier_start_is_used_again(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the weights of step 2 have just gone"):
        evaluated_policy.weights_of_step(run_dir.path, 2, tmp_path)
    checkpoint = write_checkpoint(run_dir, 2)
    exported = tmp_path / f"model_step_2_{file_digest(checkpoint / 'manifest.json')[:12]}"
    exported.mkdir()
    commit(exported, "weights", 2)
    assert evaluated_policy.weights_of_step(run_dir.path, 2, tmp_path) == exported
    # The same step of another run, or trained again, is another model: its own settings are asked for.
    other = RunDir(tmp_path / "other")
    write_checkpoint(other, 2, content="other")
    with pytest.raises(FileNotFoundError, match=r"other/checkpoints/step_2/trainer/config\.toml"):
        evaluated_policy.weights_of_step(other.path, 2, tmp_path)


def test_what_is_not_set_is_as_in_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    environments = [EnvironmentConfig(id="reverse_text", args={"max_length": 5}, group_size=2)]
    sampling = SamplingConfig(max_tokens=77, temperature=0.5)
    trained = OrchestratorConfig(environments=environments, seq_len=3000, sampling=sampling)
    write_settings(run_dir, "orchestrator", trained)
    found = evaluated_policy.with_settings_of_run(EvaluateConfig(run=tmp_path))
    asked = [EnvironmentConfig(id="reverse_text", args={"max_length": 5})]
    assert (found.environments, found.seq_len) == (asked, 3000), "an evaluation has a number of samples of its own"
    assert (found.sampling.max_tokens, found.sampling.temperature) == (77, 1.0)
    assert found.inference.model.max_len == 3000
    set_here = {"environments": [{"id": "a"}], "seq_len": 50, "sampling": {"max_tokens": 5}}
    own = EvaluateConfig.model_validate({"run": tmp_path} | set_here)
    kept = evaluated_policy.with_settings_of_run(own)
    assert (kept.environments, kept.seq_len, kept.sampling.max_tokens) == (own.environments, 50, 5)


def test_two_evaluations_are_shown_side_by_side(run_command: Command, tmp_path: Path) -> None:
    first, second = FakeEngine(version=0, digest="one"), FakeEngine(version=0, digest="two")
    with serving(first, second):
        evaluated(config_of(tmp_path / "a", first, environments=[LETTERS]))
        evaluated(config_of(tmp_path / "b", second, environments=[LETTERS], sampling={"max_tokens": 20}))
    code, out, _ = run_command("evaluate", "--compare", tmp_path / "a", tmp_path / "b")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and lines[0][:2] == ["A", str(tmp_path / "a")] and "digest one" in out
    assert ["letters", "avg@4", "6"] in [line[:3] for line in lines]
    assert "they differ in sampling: A temperature 1, top_p 1, top_k 0, min_p 0, max_tokens 24, stop [], B " in out
    code, out, _ = run_command("evaluate", f"--compare={tmp_path / 'a'}", tmp_path / "b")
    assert code == 2, "two words, as the help says"
    code, out, _ = run_command("evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--json")
    document = json.loads(out)
    assert [line["name"] for line in document["lines"]] == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert not document["answers"] and "task 0" not in out
    code, out, _ = run_command("evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--answers", "2")
    shown = out.splitlines()[-8:]
    assert code == 0 and [line[:16] for line in shown[1::4]] == ["letters, task 0:", "letters, task 1:"]
    rollouts = {path: read_evaluation(tmp_path / path)[1]["letters", 1][0] for path in ("a", "b")}
    for line, name in zip(shown[6:], rollouts, strict=True):
        rollout = rollouts[name]
        text = "".join(turn.text for turn in rollout.turns[1:])
        assert text and line == f"  {name.upper()}  reward {rollout.reward:.5g}  {printable(text)}"
    assert shown[5].endswith(f": {printable(rollouts['a'].turns[0].text)}")
