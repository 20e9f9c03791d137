"""Every configuration model: documented, and the same after being written as TOML and read again."""

import math
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from docs_tools.listing import texts_of
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import (
    DpoConfig,
    EvaluateConfig,
    InferenceConfig,
    OrchestratorConfig,
    RewardTrainingConfig,
    RlConfig,
    SftConfig,
    TrainerConfig,
)
from holdfast.config.algorithm import DistillationConfig
from holdfast.config.base import Command, ModelConfig
from holdfast.config.load import read_toml, to_toml
from holdfast.config.resolved import fingerprint
from holdfast.config.rl import hand_down_shared
from tests.builders.toy import ENVIRONMENTS, MODEL
from tests.conftest import ROOT

COMMANDS = (SftConfig, DpoConfig, RewardTrainingConfig, RlConfig, TrainerConfig, OrchestratorConfig, InferenceConfig)
SHIPPED = sorted(path for name in ("configs", "examples") for path in (ROOT / name).rglob("*.toml"))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, UnionType, list, dict, tuple):
        return [model for part in typing.get_args(annotation) for model in models_in(part)]
    return []


def fields_below(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for section in models_in(info.annotation):
            yield from fields_below(section, f"{prefix}{name}.")


def test_a_chat_template_of_its_own_is_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (template := tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    config = hand_down_shared(
        RlConfig.model_validate(
            {"model": {"name": MODEL, "chat_template": str(template)}, "orchestrator": {"environments": ENVIRONMENTS}}
        )
    )
    parts = [config.trainer.model, config.orchestrator.model, config.inference.model]
    (name,) = {part.tokenizer_name for part in parts}
    own, original = load_tokenizer(name), load_tokenizer(MODEL)
    assert own.decode(own.prompt([{"role": "user", "content": "ab"}])) == "<ab>"
    assert own.stop_token_ids == original.stop_token_ids and own.encode("dog") == original.encode("dog")
    again = RlConfig.model_validate_json(config.model_dump_json())
    template.write_text("{{ messages }}")
    assert RlConfig.model_validate_json(again.model_dump_json()).orchestrator.model.tokenizer_name == name
    assert ModelConfig(name=MODEL, chat_template=str(template)).tokenizer_name != name
    (Path(name) / "tokenizer.json").write_text("{")  # as a full disk leaves it
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert ModelConfig(name=MODEL, chat_template=str(template)).tokenizer_name == name
    assert load_tokenizer(name).encode("dog") == original.encode("dog")
    assert [path.name for path in (tmp_path / "cache" / "tokenizers").glob(".*")] == []
    for given, said in (
        ({"name": "some/model"}, "hf download some/model"),
        ({"name": MODEL}, "no.jinja: No such file"),
    ):
        with pytest.raises(ValidationError, match=said):
            ModelConfig.model_validate(given | {"chat_template": str(tmp_path / "no.jinja")})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_says_what_it_is_and_a_file_can_say_it(command: type[Command], tmp_path: Path) -> None:
    fields = list(fields_below(command))
    assert len(fields) > 10
    models = [command, *(model for _, info in fields for model in models_in(info.annotation))]
    assert [name for model in models for name, text in texts_of(model).items() if len(text) < 8] == []
    for name, info in fields:
        # TOML has no null: a field that may be None must have None as its default, or a file cannot restore it.
        assert type(None) not in typing.get_args(info.annotation) or info.default is None, name
        # A partly filled section starts from its class, so the default section must be the same as the class's.
        assert "." in name or not isinstance(info.default, BaseModel) or info.default == type(info.default)(), name
    path = tmp_path / "resolved.toml"
    steps = {"max_steps": 50} if "max_steps" in command.model_fields else {}  # else its data say how many
    config = command.model_validate(steps)
    path.write_text(to_toml(config))
    assert read_toml(command, path) == config


def test_unusual_values_survive_toml(tmp_path: Path) -> None:
    config = SftConfig(
        output_dir=Path("a 'b' \"c\"\\d"),
        max_steps=10**9,
        ckpt={"resume_step": "latest", "keep": 1},  # type: ignore[arg-type]
        model={"name": "\u00e9\n\t\x7f\u2028", "tokenizer": "", "activation_checkpointing": True},  # type: ignore[arg-type]
        optim={"lr": 1e-12, "betas": (0.0, 0.1 + 0.2), "max_grad_norm": math.inf},  # type: ignore[arg-type]
    )
    (tmp_path / "sft.toml").write_text(to_toml(config), encoding="utf-8", newline="")
    again = read_toml(SftConfig, tmp_path / "sft.toml")
    assert again == config and fingerprint(again) == fingerprint(config)


def kind_of(path: Path) -> type[Command]:
    """A shipped config is for the command that its name starts with; train and orch are sections of rl. Those in
    algorithms/ are laid over one of rl."""
    kinds = {"sft": SftConfig, "lora": SftConfig, "dpo": DpoConfig, "reward": RewardTrainingConfig, "rl": RlConfig,
             "distillation": RlConfig, "train": TrainerConfig, "orch": OrchestratorConfig, "infer": InferenceConfig,
             "evaluate": EvaluateConfig}  # fmt: skip
    return RlConfig if path.parent.name == "algorithms" else kinds[path.stem.split("_")[0]]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_is_valid(path: Path) -> None:
    command = kind_of(path)
    default = command(model=ModelConfig()) if command is EvaluateConfig else command()  # type: ignore[call-arg]
    assert read_toml(command, path) != default, "a shipped config says something"


OVERLONG = {"length_max_tokens": 5, "length_buffer_tokens": 2}
PENALTY = {"coef": 0.1, "place": "reward"}
GDPO: dict[str, Any] = {"advantage": "gdpo", "rewards": {"weights": {"reward": 1.0}}}


@pytest.mark.parametrize(("values", "says"), [
    ({"advantage": "gae"}, "'gae' and a critic go together: set critic"),
    ({"critic": {}}, "'gae' and a critic go together: set advantage"),
    ({"advantage": "distillation", "kl": {}}, "needs a teacher: set kl.reference"),
    ({"distillation": {}, "kl": {"coef": 0.1}}, "needs a teacher: set kl.reference"),
    ({"distillation": {}, "loss": {"type": "sft"}}, "no effect with loss.type = 'sft'"),
    ({"distillation": {}, "loss": {"type": "gspo"}}, "set loss.type = 'gspo_token'"),
    ({"distillation": {"divergence": "full"}}, "of which a teacher behind a server"),
    ({"distillation": {}, "kl": {"reference": "t", "refresh_interval": 2}}, "its own teacher"),
    ({"advantage": "distillation", "kl": PENALTY | {"reference": "t"}}, "is what distillation does"),
    ({"kl": {"coef": 0.1, "estimator": "k1"}}, "gradient that is zero on average"),
    ({"kl": {"place": "reward", "estimator": "k3_unbiased"}}, "a reward has none: take 'k1'"),
    ({"kl": {"target": 6.0}}, "set coef above 0"),
    ({"rewards": {"length_max_tokens": 5}}, "go together: set both or neither"),
    ({"rewards": {"length_penalty": 2}}, "length_penalty has no effect without length_buffer_tokens"),
    ({"kl": {"horizon": 5}}, "horizon has no effect without target"),
    ({"pretraining": {"data": {"name": "rows.jsonl", "validation_fraction": 0.1}}}, "nothing validates here"),
    ({"kl": {"reference": ""}}, "at least 1 character"),
    ({"advantage": "gae", "critic": {"optim": {"min_lr_ratio": 0.1}}}, "min_lr_ratio = 0.1 has no effect"),
    ({"advantage": "pass_at_k"}, "k\n  Field required"),
    ({"advantage": {"k": 2}}, "k\n  Extra inputs are not permitted"),
    ({"advantage": "max_rl", "kl": {"coef": 0.1, "place": "reward"}}, "kl.place = 'reward' can make negative"),
    ({"advantage": "max_rl", "rewards": OVERLONG}, "which rewards.length_buffer_tokens can make negative"),
    ({"advantage": "max_rl", "reward_model": {"name": "m"}}, "which reward_model can make negative"),
    ({"advantage": "max_rl", "rewards": {"weights": {"reward": 1, "n": -1}}}, "weights below 0 can make negative"),
    ({"environments": {"a": {"advantage": "max_rl"}}, "rewards": OVERLONG}, "length_buffer_tokens can make neg"),
    ({"advantage": "gdpo"}, "name them in rewards.weights"),
    (GDPO | {"kl": {"coef": 0.1, "place": "reward"}}, "so kl.place = 'reward' would have no effect"),
    (GDPO | {"reward_model": {"name": "m"}}, "so reward_model would have no effect"),
    ({"advantage": "gdpo", "rewards": {"weights": {"reward": 1}} | OVERLONG}, "length_buffer_tokens would have no"),
    ({"advantage": "gdpo", "rewards": {"weights": {"reward": 1}, "clip": 1}}, "rewards.clip would have no effect"),
    ({"advantage": "gdpo", "rewards": {"weights": {"reward": 1}, "scale": "running"}}, "scale would have no"),
    ({"advantage": "gae", "critic": {}, "environments": {"a": {}}}, "'gae' needs a model: leave environments out"),
    ({"environments": {"a": {"advantage": "distillation"}}}, "'distillation' needs a model"),
    ({"environments": {"a": {"advantage": "rlo"}}}, "'rlo' found.*'rloo'"),
    ({"environments": {"a": {"weight": 0}}}, "greater than 0"),
    (
        {"model": {"lora": {}}, "weights": {"transport": "collective"}},
        "'collective' sends whole models, and model.lora",
    ),
    ({"rewards": OVERLONG | {"length_max_tokens": 1}}, r"buffer_tokens \(2\) is more than length_max_tokens \(1\)"),
    ({"model": {"lora": {"dropout": 0.1}}}, "model.lora.dropout = 0.1: engines sample without dropout"),
])  # fmt: skip
def test_parts_of_the_trainer_that_do_not_fit_together_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainerConfig.model_validate(values)


def test_settings_of_advantages_may_be_for_one_environment_alone() -> None:
    values = {
        "environments": {
            "a": {"advantage": {"type": "pass_at_k", "k": 2}},
            "b": {"advantage": {"type": "grpo", "std": "batch"}},
            "c": {"advantage": "own:f"},
        }
    }
    config = TrainerConfig.model_validate(values)
    assert config.advantages == ("dr_grpo", "pass_at_k", "grpo", "own:f")
    assert [config.advantage_of(name).type for name in "abcd"] == ["pass_at_k", "grpo", "own:f", "dr_grpo"]


def test_a_teacher_may_also_hold_the_policy_in_the_loss() -> None:
    kl = {"reference": "teacher", "coef": 0.1, "place": "loss"}
    config = TrainerConfig.model_validate({"advantage": "distillation", "kl": kl})
    assert config.kl is not None and config.distillation == DistillationConfig(coef=1.0)
    assert TrainerConfig.model_validate({"distillation": {"coef": 0.5}, "kl": kl}).advantage.type == "dr_grpo"


EVAL = {"interval": 4, "environments": ENVIRONMENTS}
SHORT = {"model": {"max_len": 32}}
EVALUATED: dict[str, Any] = {"eval": EVAL, "ckpt": {"interval": 2}}


@pytest.mark.parametrize(("command", "changes", "said"), [
    (EvaluateConfig, {"run": "a", "interval": 3}, "interval = 3 is of steps that are followed"),
    (EvaluateConfig, {"run": "a", "follow": True, "step": 4}, "leave step out"),
    (EvaluateConfig, {"run": None, "follow": True, "model": {"name": "a"}}, "set run, and leave step out"),
    (EvaluateConfig, {"run": "a", "follow": True, "clean": True}, "clean removes them"),
    (SftConfig, {"eval": EVAL}, "there are none but of the last step: set ckpt.interval to 4"),
    (SftConfig, {"eval": EVAL, "ckpt": {"interval": 3}}, "ckpt.interval = 3: set ckpt.interval to 4"),
    (SftConfig, EVALUATED | {"parallel": {"nodes": 2, "rdzv_endpoint": "a"}}, "--follow` where there is room"),
    (SftConfig, EVALUATED | {"slurm": {}}, "--follow` where there is room"),
    (SftConfig, {"eval": EVAL | {"inference": {"engines": 2}}}, "an evaluation has one server"),
    (SftConfig, {"eval": EVAL | {"seq_len": 64, "inference": SHORT}}, "is more than inference.model.max_len"),
    (SftConfig, {"eval": {"environments": []}}, "at least 1 item"),
    (RlConfig, {"profile": "3:5", "max_steps": 4}, "ends after max_steps = 4"),
    (RlConfig, {"trainer": {"profile": "3:5", "max_steps": 4}}, "ends after max_steps = 4"),
    (RewardTrainingConfig, {"model": {"fp32_lm_head": True}}, "a reward model has no such layer"),
    (SftConfig, {"ckpt": {"keep_best": "max:"}}, "keep_best = 'max:' names no metric"),
    (SftConfig, {"ckpt": {"init_from": "a", "resume_dir": "b"}}, "give one of them"),
    (SftConfig, {"model": {"lora": {"target_modules": []}}}, "must name at least one layer, or be 'all-linear'"),
    (SftConfig, {"model": {"lora": {}, "init": "random"}}, "has lora, which adapts pretrained weights, and init"),
    (DpoConfig, {"val_interval": 3}, "val_interval = 3 needs data.validation_fraction above 0, got 0"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(command: type[Command], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        command.model_validate(changes)
