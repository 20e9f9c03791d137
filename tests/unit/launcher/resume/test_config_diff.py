"""A resumed run says which settings are not those of before, and what follows from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import RlConfig, SftConfig, TrainerConfig
from holdfast.config.algorithm import PretrainingConfig
from holdfast.config.base import CkptConfig
from holdfast.config.orchestrator import OrchestratorConfig, TeacherConfig
from holdfast.config.resolved import FREE, fingerprint, makes_same_batches
from holdfast.config.training import SftDataConfig, learning_rate
from holdfast.errors import CheckpointError
from holdfast.launcher.resume.config_diff import (
    compare_settings,
    describe_stretch,
    refuse_other_model,
    refuse_other_tensors,
    settings_of,
)
from tests.builders.toy import ENVIRONMENTS


def test_where_and_from_which_step_an_attempt_starts_is_no_drift() -> None:
    before = SftConfig(ckpt=CkptConfig(interval=5))
    ckpt = CkptConfig(interval=5, resume_step=5, resume_dir=Path("other/checkpoints/step_5"))
    after = SftConfig(ckpt=ckpt, clean=True, dry_run=True, output_dir=Path("elsewhere"))
    assert compare_settings(settings_of(before), settings_of(after)).describe("sft", "before") == []
    warm = SftConfig(ckpt=CkptConfig(interval=5, init_from=Path("model")))
    assert compare_settings(settings_of(before), settings_of(warm)).describe("sft", "before") == []


def test_settings_of_one_environment_are_named_with_its_place() -> None:
    section: dict[str, Any] = {"id": "reverse_text", "weight": 2.0, "timeout_s": 5.0}
    teacher = {"urls": ["http://here:1"], "model": "m"}
    before = OrchestratorConfig.model_validate({"environments": [section], "teacher": teacher})
    after = OrchestratorConfig.model_validate(
        {"environments": [section | {"weight": 3.0, "timeout_s": 9.0}], "teacher": teacher | {"urls": ["http://b:2"]}}
    )
    drift = compare_settings(settings_of(before), settings_of(after))
    assert drift.computing == ["environments[0].weight: 2.0 -> 3.0"]
    assert drift.free == ["environments[0].timeout_s: 5.0 -> 9.0", "teacher.urls: ['http://here:1'] -> ['http://b:2']"]


def test_every_free_setting_is_one() -> None:
    """A name that no process has would be dead; `engine.threads` is one of the inference server."""
    config = RlConfig.model_validate({"orchestrator": {"environments": ENVIRONMENTS}})
    config.orchestrator.teacher = TeacherConfig(urls=["http://here:1"], model="m")
    config.trainer.pretraining = PretrainingConfig(data=SftDataConfig(name="rows.jsonl"))
    processes = [config.trainer, config.orchestrator, config.inference, SftConfig(ckpt=CkptConfig())]
    for key in FREE:
        first, *further = key.replace("[]", "").split(".")
        owners = [process for process in processes if first in type(process).model_fields]
        if "[]" in key:  # the trainer has environments by name
            owners = [process for process in owners if isinstance(getattr(process, first), list)]
        assert owners, key
        parts = [getattr(owner, first) for owner in owners] if further else []
        for part in parts:
            owner = part[0] if isinstance(part, list) else part
            for name in further[:-1]:
                owner = getattr(owner, name)
            assert further[-1] in type(owner).model_fields, key


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


def test_the_fingerprint_follows_the_ends_of_all_schedules() -> None:
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

    assert fingerprint_of(20) != fingerprint_of(40)
    assert fingerprint_of(20) == fingerprint_of(40, schedule_steps=20)
    assert fingerprint_of(20, schedule="constant") == fingerprint_of(40, schedule="constant")


def test_batches_are_the_same_when_nothing_that_makes_them_changed() -> None:
    def orchestrator(**settings: Any) -> OrchestratorConfig:
        return OrchestratorConfig.model_validate({"environments": ENVIRONMENTS} | settings)

    environment = {"id": "reverse_text", "timeout_s": 60.0}
    places = ({"output_dir": "x"}, {"client": {"urls": ["http://other"]}}, {"ckpt": {}}, {"eval": {"interval": 2}})
    for same in ({"max_steps": 7}, {"environments": [environment]}, *places):
        assert makes_same_batches(orchestrator(), orchestrator(**same)), same
    # What only says how long is waited, and for whom, makes no other batch.
    timeouts = ({"timeout_s": 9.0}, {"ready_timeout_s": 9.0}, {"urls": ["http://there:2"]}, {"max_concurrency": 7})
    teacher = {"urls": ["http://here:1"], "model": "m"}
    for changed in (*timeouts, {"model": "n"}):
        after = orchestrator(teacher=teacher | changed)
        assert makes_same_batches(orchestrator(teacher=teacher), after) is ("model" not in changed), changed
    samplings = ({"sampling": {"temperature": 0.5}}, {"sampling": {"top_p": 0.9}})
    tasks = {"environments": [environment | {"args": {"max_length": 9}}]}
    for other in ({"teacher": teacher}, tasks, {"seed": 7}, {"group_size": 2}, *samplings, {"async_level": 0}):
        assert not makes_same_batches(orchestrator(), orchestrator(**other)), other


def _models(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, content in (("before.json", before), ("after.json", after)):
        (tmp_path / name).write_text(json.dumps(content))
    refuse_other_model(
        tmp_path / "before.json", tmp_path / "after.json", model_name="my/model", what="the checkpoint of step 5"
    )


def test_models_that_differ_in_nothing_that_shapes_them_are_accepted(tmp_path: Path) -> None:
    before = {"model_type": "qwen3", "hidden_size": 32, "head_dim": None, "attention_dropout": 0.0}
    _models(tmp_path, before, {"model_type": "qwen3", "hidden_size": 32, "head_dim": 8, "attention_dropout": 0.3})
    refuse_other_model(tmp_path / "nowhere.json", tmp_path / "after.json", model_name="m", what="it")
    with pytest.raises(CheckpointError, match="text_config.vocab_size: 5 -> 6"):
        _models(tmp_path, {"text_config": {"vocab_size": 5}}, {"text_config": {"vocab_size": 6}})
    (tmp_path / "before.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"before\.json or .*after\.json is not JSON"):
        refuse_other_model(tmp_path / "before.json", tmp_path / "after.json", model_name="m", what="it")


_COMPACT = {"moments_dtype": "bfloat16"}
_CRITIC = {"advantage": "gae", "critic": {}}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, _CRITIC, "critic: unset -> set"),
        (_CRITIC, {}, "critic: set -> unset"),
        ({"ema": {}}, {}, "ema: set -> unset"),
        ({"model": {"lora": {}}}, {"ema": {}}, "model.lora: set -> unset"),
        ({"kl": {"refresh_interval": 3}}, {"kl": {}}, "kl.refresh_interval: 3 -> unset"),
        ({}, {"optim": {"type": "muon"}}, "optim.type: 'adamw' -> 'muon'"),
        (_CRITIC | {"critic": {"optim": {"type": "muon"}}}, _CRITIC, "critic.optim.type: 'muon' -> 'adamw'"),
        ({}, {"optim": _COMPACT}, "  optim.moments_dtype: 'float32' -> 'bfloat16'"),
        (_CRITIC | {"critic": {"optim": _COMPACT}}, _CRITIC, "critic.optim.moments_dtype: 'bfloat16' -> 'float32'"),
        ({}, {"kl": {"refresh_interval": 3}}, "kl.refresh_interval: unset -> 3"),
    ],
)
def test_other_tensors_than_before_are_refused(before: dict[str, Any], after: dict[str, Any], says: str) -> None:
    settings = settings_of(TrainerConfig.model_validate(before))
    with pytest.raises(CheckpointError) as caught:
        refuse_other_tensors(settings, TrainerConfig.model_validate(after), step=5)
    message = str(caught.value)
    assert "the checkpoint of step 5 holds other tensors" in message and says in message
    assert "ckpt export STEP --to DIR" in message and caught.value.exit_code == 2


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
    assert compare_settings(older, settings_of(plain)).describe("rl", "before") == []
    critics = (_CRITIC | {"critic": {"lam": lam}, "kl": {"refresh_interval": int(10 * lam)}} for lam in (0.9, 1.0))
    one, other = map(TrainerConfig.model_validate, critics)
    refuse_other_tensors(settings_of(one), other, step=5)
