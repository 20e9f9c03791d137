"""The same command again in a directory that holds something: it goes on, or is refused, and nothing is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import CkptConfig, DpoConfig, RlConfig, SftConfig, TrainerConfig
from holdfast.config.rl import hand_down_shared
from holdfast.errors import RunDirError
from holdfast.launcher.failures import profile_lines
from holdfast.launcher.resume.attempt import Attempt, write_config
from holdfast.launcher.resume.prepare import prepare
from holdfast.run.run_dir import RunDir
from tests.builders.launches import start_rl
from tests.unit.launcher.resume.test_resume import add_batch, add_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def _sft(run: RunDir, **changes: Any) -> SftConfig:
    return SftConfig(**{"output_dir": run.path, "max_steps": 100, "optim": {"schedule": "constant"}, **changes})


def _start(config: SftConfig) -> Attempt:
    attempt = prepare(config, clean=False, dry_run=False)
    write_config(attempt, "sft", config, dry_run=False)
    return attempt


def _train(run: RunDir, step: int) -> None:
    run.metrics.write_text("".join(json.dumps({"step": one}) + "\n" for one in range(1, step + 1)))


def _end(run: RunDir, attempt: int, *, step: int, exit_code: int) -> None:
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    event = {"time": 1.0, "process": "launcher", "phase": "ended", "exit_code": exit_code, "step": step, "error": None}
    torn = '{"time": 2.0, "proc'
    (run.logs(attempt) / "events.jsonl").write_text(json.dumps(event) + "\n" + torn)


def test_a_directory_without_work_is_not_a_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that failed is mended and repeated, also with other settings."""
    _start(_sft(run))
    _end(run, 1, step=0, exit_code=2)
    run.metrics.touch()
    attempt = _start(_sft(run, seed=7))
    assert (attempt.number, attempt.resume_step) == (2, None)
    assert "unfinished" not in capsys.readouterr().out


def test_a_killed_run_goes_on_from_its_newest_checkpoint(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    config = _sft(run, ckpt=CkptConfig(interval=5))
    _start(config)
    _train(run, 7)
    add_checkpoint(run, 5)
    assert _start(config).resume_step == 5
    assert f"continuing the unfinished run in {run.path}: " in capsys.readouterr().out


def test_a_killed_run_without_a_checkpoint_begins_anew(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _start(_sft(run))
    _train(run, 7)
    attempt = _start(_sft(run, max_steps=120, keep_attempts=5))  # neither changes what a step computes
    assert (attempt.number, attempt.resume_step) == (2, None)
    said = capsys.readouterr().out
    assert "saved no step: it starts again" in said and "starting from scratch" in said
    assert run.metrics.read_text() == "" and list(run.discarded(2).iterdir()) == [run.discarded(2) / "metrics.jsonl"]


def test_a_killed_run_without_a_step_goes_on_from_its_journal(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    config = hand_down_shared(RlConfig(output_dir=run.path, max_steps=100))
    start_rl(config)
    for step in (1, 2, 3):
        add_batch(run, step, version=step - 1)
    assert start_rl(config).resume_step is None
    said = capsys.readouterr().out
    assert "batches 1 to 3 are in the journal: training them again, without sampling" in said
    assert "continuing the unfinished run" in said and "starts again" not in said
    assert run.published_batches() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ckpt": CkptConfig()}, "again"),
        ({"ckpt": CkptConfig(resume_step="auto")}, "again"),
        ({"ckpt": CkptConfig(resume_step=5)}, "again with --ckpt.resume-step latest"),
        ({"clean": True}, "again without --clean"),
    ],
)
def test_an_attempt_knows_which_command_goes_on(run: RunDir, changes: dict[str, Any], said: str) -> None:
    _start(_sft(run))
    add_checkpoint(run, 5)
    config = _sft(run, **changes)
    assert prepare(config, clean=config.clean, dry_run=True).to_go_on == f"give the same command {said}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 7}, "seed: 0 -> 7"),
        ({"optim": {"lr": 0.5}}, "optim.lr: "),
        ({"model": {"lora": {"rank": 4}}}, "model.lora.rank: "),
        ({"max_steps": 50, "optim": {"schedule": "linear"}}, "optim.schedule: "),
        ({"ckpt": {"init_from": "elsewhere"}}, "ckpt.init_from: unset -> elsewhere"),
    ],
)
def test_other_settings_are_refused_and_nothing_moves(run: RunDir, changes: dict[str, Any], said: str) -> None:
    _start(_sft(run))
    _train(run, 7)
    with pytest.raises(RunDirError) as caught:
        _start(_sft(run, **changes))
    text = str(caught.value)
    assert said in text and "--ckpt.resume-step auto" in text and "--output-dir" in text and "--clean" not in text
    assert run.next_attempt() == 2 and run.metrics.read_text() and not run.discarded(2).exists()


def test_a_run_with_checkpoints_does_not_go_on_without(run: RunDir) -> None:
    """Its trainer would begin at step 1, behind the metrics of the steps before."""
    _start(_sft(run, ckpt=CkptConfig(interval=5)))
    _train(run, 7)
    add_checkpoint(run, 5)
    with pytest.raises(RunDirError, match="ckpt: set -> unset"):
        _start(_sft(run))


def test_an_end_of_the_schedule_that_moves_is_refused(run: RunDir) -> None:
    _start(_sft(run, optim={"schedule": "linear"}))
    _train(run, 7)
    with pytest.raises(RunDirError, match="the linear schedule now ends at step 200 instead of 100"):
        _start(_sft(run, max_steps=200, optim={"schedule": "linear"}))


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_finished_run_is_refused(run: RunDir, has_checkpoint: bool) -> None:
    _start(_sft(run))
    _train(run, 100)
    if has_checkpoint:
        add_checkpoint(run, 100)
    _end(run, 1, step=100, exit_code=0)
    for max_steps in (100, 200):
        with pytest.raises(RunDirError) as caught:
            _start(_sft(run, max_steps=max_steps))
        text = str(caught.value)
        assert "is finished, at step 100" in text and "--output-dir" in text and "--clean" not in text
        way_out = "--ckpt.resume-step latest (step 100)" if has_checkpoint else f"--model.name {run.weights_of(100)}"
        assert way_out in text


def test_a_run_that_finished_before_a_later_attempt_is_not_finished(run: RunDir) -> None:
    _start(_sft(run))
    _train(run, 100)
    add_checkpoint(run, 100)
    _end(run, 1, step=100, exit_code=0)
    longer = _sft(run, max_steps=200, ckpt=CkptConfig(resume_step="latest"))
    _start(longer)
    run.logs(2).mkdir(parents=True)
    assert _start(_sft(run, max_steps=200, ckpt=CkptConfig())).resume_step == 100


def test_the_directory_of_another_program_is_refused(run: RunDir) -> None:
    _start(_sft(run))
    _train(run, 7)
    with pytest.raises(RunDirError, match="holds a run of sft: choose another directory"):
        prepare(DpoConfig(output_dir=run.path), clean=False, dry_run=False)


def test_the_directory_of_an_evaluation_is_refused(run: RunDir) -> None:
    run.create()
    (run.path / "config").mkdir()
    (run.path / "config" / "evaluate.toml").touch()
    for clean, ckpt in ((False, CkptConfig()), (True, CkptConfig()), (False, CkptConfig(resume_step="auto"))):
        with pytest.raises(RunDirError, match="holds an evaluation: choose another directory"):
            prepare(_sft(run, ckpt=ckpt), clean=clean, dry_run=False)


def test_a_schedule_of_the_critic_that_moves_is_refused(run: RunDir) -> None:
    def start(max_steps: int) -> None:
        critic = {"optim": {"schedule": "linear"}}
        config = TrainerConfig.model_validate(
            {"output_dir": run.path, "max_steps": max_steps, "advantage": "gae", "critic": critic}
        )
        write_config(prepare(config, clean=False, dry_run=False), "trainer", config, dry_run=False)

    start(100)
    _train(run, 7)
    start(100)
    _train(run, 7)
    with pytest.raises(RunDirError, match="the schedule of the critic now ends at step 200 instead of 100"):
        start(200)


def test_what_was_chosen_for_another_device_is_no_other_setting(run: RunDir) -> None:
    def on(device: str, **model: Any) -> SftConfig:
        return _sft(run, parallel={"device": device}, model={"activation_checkpointing": device == "cuda", **model})

    _start(on("cuda"))
    _train(run, 7)
    assert _start(on("cpu")).number == 2
    _train(run, 7)
    with pytest.raises(RunDirError, match="model.activation_checkpointing: False -> True"):
        _start(_sft(run, parallel={"device": "cpu"}, model={"activation_checkpointing": True}))


def test_a_fork_that_was_killed_before_its_copy_is_no_fork_any_more(run: RunDir, tmp_path: Path) -> None:
    run.create(forked_from={"run_id": "other", "step": 5, "path": str(tmp_path / "other")})
    _start(_sft(run))
    assert run.forked_from() is None


def test_a_run_says_that_it_no_longer_profiles(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt = CkptConfig(interval=5)
    _start(_sft(run, ckpt=ckpt))
    add_checkpoint(run, 5)
    for profile, is_told in (("3:5", True), ("3:6", False)):
        prepare(_sft(run, ckpt=ckpt, profile=profile), clean=False, dry_run=True)
        told = f"WARNING: profile = {profile}: nothing is profiled, the run continues from step 5"
        assert (told in capsys.readouterr().out) is is_told


def test_the_end_names_the_profiles_of_the_newest_attempt_that_has_any(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    config = SftConfig(output_dir=tmp_path, profile="3:5")
    assert profile_lines(run_dir, config) == []
    for attempt, name in (
        (2, "profile_steps_3_to_3/rank_0.json.gz"),
        (10, "profile_steps_4_to_5/rank_0.json.gz"),
        (10, "profile_steps_4_to_5/rank_1.json.gz"),
        (11, "trainer.log"),
    ):
        (run_dir.logs(attempt) / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir.logs(attempt) / name).touch()
    path = run_dir.logs(10) / "profile_steps_4_to_5"
    assert profile_lines(run_dir, config) == [f"profile: {path} (a trace of each rank, for https://ui.perfetto.dev)"]
    assert profile_lines(run_dir, SftConfig(output_dir=tmp_path)) == []


def test_unlisted_logs_do_not_hide_how_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: RunDir) -> list[Path]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RunDir, "profiles", fail)
    (said,) = profile_lines(RunDir(tmp_path), SftConfig(output_dir=tmp_path, profile="3:5"))
    assert said == "cannot list the profiles: [Errno 5] Input/output error"
