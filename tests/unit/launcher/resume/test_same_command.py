"""The same command again in a directory that holds something: it goes on, or is refused, and says what differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import CkptConfig, DpoConfig, RlConfig, SftConfig, TrainerConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.resolved import fingerprint, makes_same_batches
from holdfast.config.rl import hand_down_shared
from holdfast.config.training import learning_rate
from holdfast.errors import CheckpointError, RunDirError
from holdfast.launcher.restart_policy import profile_lines
from holdfast.launcher.resume import config_diff
from holdfast.launcher.resume.attempt import Attempt, write_config
from holdfast.launcher.resume.config_diff import compare_settings, describe_stretch, refuse_other_tensors, settings_of
from holdfast.launcher.resume.prepare import prepare
from holdfast.run.run_dir import RunDir
from tests.builders.launches import start_rl
from tests.builders.toy import ENVIRONMENTS
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


def _end(run: RunDir, attempt: int, *, step: int, exit_code: int, trained: int = 7) -> None:
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    event = {"time": 1.0, "process": "launcher", "phase": "ended", "exit_code": exit_code, "step": step}
    event |= {"trained": trained, "error": None}
    (run.logs(attempt) / "events.jsonl").write_text(json.dumps(event) + "\n" + '{"time": 2.0, "proc')


def test_a_directory_without_work_is_not_a_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that failed is mended and repeated, also with other settings."""
    _start(_sft(run))
    _end(run, 1, step=0, exit_code=2)
    run.metrics.touch()
    attempt = _start(_sft(run, seed=7))
    assert (attempt.number, attempt.resume_step) == (2, None) and "unfinished" not in capsys.readouterr().out


def test_a_start_that_the_trainer_refused_is_no_attempt(run: RunDir) -> None:
    _start(_sft(run, ckpt=CkptConfig(interval=5)))
    _train(run, 7)
    add_checkpoint(run, 5)
    for trained in (0, 1):
        other = _start(_sft(run, seed=7, ckpt=CkptConfig(interval=5, resume_step="auto")))
        _end(run, other.number, step=5 + trained, exit_code=2, trained=trained)
        if trained == 0:
            assert _start(_sft(run, ckpt=CkptConfig(interval=5))).resume_step == 5
    with pytest.raises(RunDirError, match="seed: 7 -> 0"):
        _start(_sft(run, ckpt=CkptConfig(interval=5)))


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


@pytest.mark.parametrize(("changes", "said"), [
    ({"ckpt": CkptConfig()}, "again"),
    ({"ckpt": CkptConfig(resume_step="auto")}, "again"),
    ({"ckpt": CkptConfig(resume_step=5)}, "again with --ckpt.resume-step latest"),
    ({"clean": True}, "again without --clean"),
])  # fmt: skip
def test_an_attempt_knows_which_command_goes_on(run: RunDir, changes: dict[str, Any], said: str) -> None:
    _start(_sft(run))
    add_checkpoint(run, 5)
    config = _sft(run, **changes)
    assert prepare(config, clean=config.clean, dry_run=True).to_go_on == f"give the same command {said}"


@pytest.mark.parametrize(("changes", "said"), [
    ({"seed": 7}, "seed: 0 -> 7"),
    ({"optim": {"lr": 0.5}}, "optim.lr: "),
    ({"model": {"lora": {"rank": 4}}}, "model.lora.rank: "),
    ({"max_steps": 50, "optim": {"schedule": "linear"}}, "optim.schedule: "),
    ({"ckpt": {"init_from": "elsewhere"}}, "ckpt.init_from: unset -> elsewhere"),
])  # fmt: skip
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
    _start(_sft(run, max_steps=200, ckpt=CkptConfig(resume_step="latest")))
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


def test_where_and_from_which_step_an_attempt_starts_is_no_drift() -> None:
    before = SftConfig(ckpt=CkptConfig(interval=5))
    ckpt = CkptConfig(interval=5, resume_step=5, resume_dir=Path("other/checkpoints/step_5"))
    after = SftConfig(ckpt=ckpt, clean=True, dry_run=True, output_dir=Path("elsewhere"))
    assert compare_settings(settings_of(before), after).describe("sft", "before") == []
    warm = SftConfig(ckpt=CkptConfig(interval=5, init_from=Path("model")))
    assert compare_settings(settings_of(before), warm).describe("sft", "before") == []


def test_settings_of_one_environment_are_named_with_its_place() -> None:
    section: dict[str, Any] = {"id": "reverse_text", "weight": 2.0, "timeout_s": 5.0}
    teacher = {"urls": ["http://here:1"], "model": "m"}
    before = OrchestratorConfig.model_validate({"environments": [section], "teacher": teacher})
    after = OrchestratorConfig.model_validate(
        {"environments": [section | {"weight": 3.0, "timeout_s": 9.0}], "teacher": teacher | {"urls": ["http://b:2"]}}
    )
    drift = compare_settings(settings_of(before), after)
    assert drift.computing == ["environments[0].timeout_s: 5.0 -> 9.0", "environments[0].weight: 2.0 -> 3.0"]
    assert drift.free == ["teacher.urls: ['http://here:1'] -> ['http://b:2']"]


def sft(max_steps: int, schedule: str = "linear", **optim: Any) -> SftConfig:
    settings = {"lr": 0.5, "schedule": schedule, "warmup_steps": 0, **optim}
    return SftConfig.model_validate({"max_steps": max_steps, "optim": settings})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_another_max_steps_stretches_the_schedule_and_is_told_with_both_rates(schedule: str) -> None:
    before, after = sft(20, schedule), sft(40, schedule)
    told = describe_stretch(settings_of(before), after, step=10)
    was, now = learning_rate(11, before.optim, 20), learning_rate(11, after.optim, 40)
    assert told == (
        f"the {schedule} schedule now ends at step 40 instead of 20: the learning rate of step 11 is {now:.6g} instead "
        f"of {was:.6g}. Keep the old schedule with --optim.schedule-steps 20."
    )
    kept = sft(40, schedule, schedule_steps=20)
    assert learning_rate(11, kept.optim, 40) == was != now, "the flag does what the message says"
    assert describe_stretch(settings_of(before), kept, step=10) is None


def test_a_schedule_of_another_version_is_left_to_the_diff_and_one_without_its_fixed_end_is_not() -> None:
    before = settings_of(sft(20))
    assert describe_stretch(before | {"optim": {"schedule": "spiral"}}, sft(40), step=10) is None
    for one, other in ((sft(20), sft(20)), (sft(20, "constant"), sft(40, "constant")), (sft(20, "constant"), sft(40))):
        assert describe_stretch(settings_of(one), other, step=10) is None
    assert describe_stretch(before, sft(40), step=10) is not None
    # Dropping the fixed end stretches the schedule too.
    told = describe_stretch(settings_of(sft(40, schedule_steps=20)), sft(40), step=10)
    assert told is not None and "ends at step 40 instead of 20" in told


def test_the_fingerprint_follows_the_ends_of_all_schedules_what_shapes_training_and_nothing_else() -> None:
    same = ({"output_dir": "elsewhere"}, {"epochs": 7}, {"ckpt": {"interval": 3}}, {"parallel": {"num_ranks": 2}})
    other = ({"seed": 1}, {"optim": {"lr": 1e-4}}, {"data": {"batch_size": 63}}, {"model": {"dtype": "bfloat16"}})
    for changes in (*same, *other):
        assert (fingerprint(SftConfig.model_validate(changes)) == fingerprint(SftConfig())) is (changes in same)
    assert fingerprint(sft(20)) != fingerprint(sft(40))
    assert fingerprint(sft(20)) == fingerprint(sft(20, schedule_steps=20)) == fingerprint(sft(40, schedule_steps=20))
    assert fingerprint(sft(20, "constant")) == fingerprint(sft(40, "constant", schedule_steps=3))
    for free in ({"batch_timeout_s": 1}, {"alerts": {"window": 99}}):
        assert fingerprint(TrainerConfig.model_validate(free)) == fingerprint(TrainerConfig())
    assert fingerprint(TrainerConfig(row_tokens=8)) != fingerprint(TrainerConfig())

    # The fingerprint follows the end of the critics schedule.
    def fingerprint_of(max_steps: int, **optim: Any) -> str:
        settings = {"max_steps": max_steps, "advantage": "gae", "critic": {"optim": {"schedule": "linear", **optim}}}
        return fingerprint(TrainerConfig.model_validate(settings))

    assert fingerprint_of(20) != fingerprint_of(40) and fingerprint_of(20) == fingerprint_of(40, schedule_steps=20)
    assert fingerprint_of(20, schedule="constant") == fingerprint_of(40, schedule="constant")


def test_batches_are_the_same_when_nothing_that_makes_them_changed() -> None:
    def orchestrator(**settings: Any) -> OrchestratorConfig:
        return OrchestratorConfig.model_validate({"environments": ENVIRONMENTS} | settings)

    environment = {"id": "reverse_text"}
    places = ({"output_dir": "x"}, {"client": {"urls": ["http://other"]}}, {"ckpt": {}}, {"eval": {"interval": 2}})
    for same in ({"max_steps": 7}, *places):
        assert makes_same_batches(orchestrator(), orchestrator(**same)), same
    # What only says how long is waited, and for whom, makes no other batch.
    timeouts = ({"timeout_s": 9.0}, {"ready_timeout_s": 9.0}, {"urls": ["http://there:2"]}, {"max_concurrency": 7})
    teacher = {"urls": ["http://here:1"], "model": "m"}
    for changed in (*timeouts, {"model": "n"}):
        after = orchestrator(teacher=teacher | changed)
        assert makes_same_batches(orchestrator(teacher=teacher), after) is ("model" not in changed), changed
    samplings = ({"sampling": {"temperature": 0.5}}, {"sampling": {"top_p": 0.9}}, {"sampling": {"stop": ["a"]}})
    tasks = [{"environments": [environment | one]} for one in ({"args": {"max_length": 9}}, {"timeout_s": 60.0})]
    for other in ({"teacher": teacher}, *tasks, {"seed": 7}, {"group_size": 2}, *samplings, {"async_level": 0}):
        assert not makes_same_batches(orchestrator(), orchestrator(**other)), other


def test_the_number_of_slots_changes_what_rounds_compute() -> None:
    def orchestrator(schedule: str, engines: int, max_concurrency: int) -> OrchestratorConfig:
        client = {"urls": [f"http://h:{port}" for port in range(1, engines + 1)], "max_concurrency": max_concurrency}
        settings = {"environments": ENVIRONMENTS, "client": client, "async_level": 2, "schedule": schedule}
        return OrchestratorConfig.model_validate(settings)

    for schedule, engines, most, is_same in (
        ("rounds", 1, 8, False), ("rounds", 2, 4, False), ("rounds", 2, 2, True), ("strict", 2, 4, True),
    ):  # fmt: skip
        before, after = orchestrator(schedule, 1, 4), orchestrator(schedule, engines, most)
        assert makes_same_batches(before, after) is is_same
        computing = compare_settings(settings_of(before), after).computing
        told = "client.max_concurrency times engines, the slots of rounds: 4 -> 8"
        assert computing == ([] if is_same else [told])


def _models(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, content in (("before.json", before), ("after.json", after)):
        (tmp_path / name).write_text(json.dumps(content))
    config_diff.refuse_other_model(
        tmp_path / "before.json", tmp_path / "after.json", model_name="my/model", what="the checkpoint of step 5"
    )


def test_models_that_differ_in_nothing_that_shapes_them_are_accepted(tmp_path: Path) -> None:
    before = {"model_type": "qwen3", "hidden_size": 32, "head_dim": None, "attention_dropout": 0.0}
    _models(tmp_path, before, {"model_type": "qwen3", "hidden_size": 32, "head_dim": 8, "attention_dropout": 0.3})
    config_diff.refuse_other_model(tmp_path / "nowhere.json", tmp_path / "after.json", model_name="m", what="it")
    with pytest.raises(CheckpointError, match="text_config.vocab_size: 5 -> 6"):
        _models(tmp_path, {"text_config": {"vocab_size": 5}}, {"text_config": {"vocab_size": 6}})
    (tmp_path / "before.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"before\.json or .*after\.json is not JSON"):
        config_diff.refuse_other_model(tmp_path / "before.json", tmp_path / "after.json", model_name="m", what="it")


_COMPACT = {"moments_dtype": "bfloat16"}
_CRITIC = {"advantage": "gae", "critic": {}}


@pytest.mark.parametrize(("before", "after", "says"), [
    ({}, _CRITIC, "critic: unset -> set"), (_CRITIC, {}, "critic: set -> unset"),
    ({"ema": {}}, {}, "ema: set -> unset"), ({"model": {"lora": {}}}, {"ema": {}}, "model.lora: set -> unset"),
    ({"kl": {"refresh_interval": 3}}, {"kl": {}}, "kl.refresh_interval: 3 -> unset"),
    ({}, {"optim": {"type": "muon"}}, "optim.type: 'adamw' -> 'muon'"),
    (_CRITIC | {"critic": {"optim": {"type": "muon"}}}, _CRITIC, "critic.optim.type: 'muon' -> 'adamw'"),
    ({}, {"optim": _COMPACT}, "  optim.moments_dtype: 'float32' -> 'bfloat16'"),
    (_CRITIC | {"critic": {"optim": _COMPACT}}, _CRITIC, "critic.optim.moments_dtype: 'bfloat16' -> 'float32'"),
    ({}, {"kl": {"refresh_interval": 3}}, "kl.refresh_interval: unset -> 3"),
])  # fmt: skip
def test_other_tensors_than_before_are_refused(before: dict[str, Any], after: dict[str, Any], says: str) -> None:
    settings = settings_of(TrainerConfig.model_validate(before))
    with pytest.raises(CheckpointError) as caught:
        refuse_other_tensors(settings, TrainerConfig.model_validate(after), step=5)
    message = str(caught.value)
    assert "the checkpoint of step 5 holds other tensors" in message and says in message
    assert "ckpt export RUN STEP --to DIR" in message and caught.value.exit_code == 2


def test_parts_without_tensors_may_come_and_go() -> None:
    plain = TrainerConfig()
    parts = TrainerConfig.model_validate(
        {"kl": {"coef": 0.1}, "rewards": {"scale": "running"}, "updates": {"epochs": 2}}
    )
    refuse_other_tensors(settings_of(plain), parts, step=5)
    refuse_other_tensors(settings_of(parts), plain, step=5)
    older = settings_of(plain)
    del older["optim"]["moments_dtype"]
    refuse_other_tensors(older, plain, step=5)
    assert compare_settings(older, plain).describe("rl", "before") == []
    critics = (_CRITIC | {"critic": {"lam": lam}, "kl": {"refresh_interval": int(10 * lam)}} for lam in (0.9, 1.0))
    one, other = map(TrainerConfig.model_validate, critics)
    refuse_other_tensors(settings_of(one), other, step=5)
