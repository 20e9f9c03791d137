"""Every configuration model: documented, and the same after being written as TOML and read again."""

from __future__ import annotations

import math
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from holdfast.shared.config import (
    DpoConfig,
    EvaluateConfig,
    InferenceConfig,
    OrchestratorConfig,
    RewardTrainingConfig,
    RlConfig,
    SftConfig,
    TrainerConfig,
)
from holdfast.shared.config.algorithm import DistillationConfig
from holdfast.shared.config.base import Command, ModelConfig
from holdfast.shared.config.fingerprint import fingerprint
from holdfast.shared.config.load import read_toml, to_toml

COMMANDS = (SftConfig, DpoConfig, RewardTrainingConfig, RlConfig, TrainerConfig, OrchestratorConfig, InferenceConfig)
CONFIGS = Path(__file__).resolve().parents[4] / "configs"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, UnionType, list, dict, tuple):
        return [model for part in typing.get_args(annotation) for model in models_in(part)]
    return []


def fields_below(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, info in model.model_fields.items():
        found.append((f"{prefix}{name}", info.description))
        for section in models_in(info.annotation):
            found += fields_below(section, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_says_what_it_is(command: type[Command]) -> None:
    fields = fields_below(command)
    assert len(fields) > 10
    undocumented = [name for name, text in fields if not text or len(text.strip()) < 8]
    assert undocumented == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_seed_output_dir_and_dry_run(command: type[Command]) -> None:
    assert {"seed", "output_dir", "dry_run"} <= command.model_fields.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_no_toml_can_say_is_not_a_meaning_of_a_field(command: type[Command]) -> None:
    """TOML has no null: a field that may be None must have None as its default, or a file cannot restore it."""

    def check(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            if type(None) in typing.get_args(info.annotation):
                assert info.default is None, f"{prefix}{name}"
            for section in models_in(info.annotation):
                check(section, f"{prefix}{name}.")

    check(command, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_survive_toml(command: type[Command], tmp_path: Path) -> None:
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(command()))
    assert read_toml(command, path) == command()


@pytest.mark.parametrize("command", COMMANDS)
def test_filling_a_part_of_a_section_leaves_the_rest_at_the_defaults(command: type[Command]) -> None:
    """A partly filled section starts from its class, so the default section must be the same as the class's."""
    for name, info in command.model_fields.items():
        if isinstance(info.default, BaseModel):
            assert info.default == type(info.default)(), name


text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
positive = st.floats(min_value=1e-12, max_value=1e12, exclude_min=True)
some_ckpt = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "interval": st.none() | st.integers(1, 10**6),
        "keep": st.none() | st.integers(1, 99),
        "resume_step": st.none() | st.integers(-1, 10**9) | st.sampled_from(["latest", "auto"]),
    },
)
some_sft = st.fixed_dictionaries(
    {},
    optional={
        "output_dir": text.filter(lambda name: bool(name.strip())).map(Path),
        "seed": st.integers(0, 2**31 - 1),
        "max_steps": st.integers(11, 10**9),
        "ckpt": some_ckpt,
        "model": st.fixed_dictionaries(
            {}, optional={"name": text, "tokenizer": st.none() | text, "activation_checkpointing": st.booleans()}
        ),
        "optim": st.fixed_dictionaries(
            {},
            optional={
                "lr": positive,
                "betas": st.tuples(st.floats(0, 1), st.floats(0, 1)),
                "max_grad_norm": positive | st.just(math.inf),
                "warmup_steps": st.integers(0, 10),
            },
        ),
        "val_interval": st.none(),  # needs validation_fraction, see the test of that rule
    },
)


@given(values=some_sft)
@settings(max_examples=60)
def test_any_sft_config_survives_toml(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    config = SftConfig(**values)
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    again = read_toml(SftConfig, path)
    assert again == config
    assert fingerprint(again) == fingerprint(config)


@given(
    args=st.dictionaries(
        text, st.integers(-(2**63), 2**63 - 1) | st.booleans() | text | st.lists(st.integers(-9, 9)), max_size=4
    ),
    name=text,
)
@settings(max_examples=60)
def test_any_environment_arguments_survive_toml(
    args: dict[str, Any], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "environments.toml"
    config = OrchestratorConfig(environments=[{"id": "jsonl", "name": name, "args": args}])  # type: ignore[list-item]
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert read_toml(OrchestratorConfig, path) == config


def kind_of(path: Path) -> type[Command]:
    """A shipped config is for the command that its name starts with; train and orch are sections of rl.

    Those in algorithms/ are laid over one of rl.
    """
    kinds = {"sft": SftConfig, "dpo": DpoConfig, "reward": RewardTrainingConfig, "rl": RlConfig, "train": TrainerConfig,
             "orch": OrchestratorConfig, "infer": InferenceConfig, "evaluate": EvaluateConfig}  # fmt: skip
    return RlConfig if path.parent.name == "algorithms" else kinds[path.stem.split("_")[0]]


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_config_is_valid(path: Path) -> None:
    command = kind_of(path)
    default = command(model=ModelConfig()) if command is EvaluateConfig else command()  # type: ignore[call-arg]
    assert read_toml(command, path) != default, "a shipped config says something"


def test_the_fingerprint_follows_what_shapes_training_and_nothing_else() -> None:
    base = SftConfig()
    for same in (
        SftConfig(output_dir=Path("elsewhere")),
        SftConfig(max_steps=7),
        SftConfig(ckpt={"interval": 3}),  # type: ignore[arg-type]
        SftConfig(parallel={"num_ranks": 2}),  # type: ignore[arg-type]
    ):
        assert fingerprint(same) == fingerprint(base)
    for other in (
        SftConfig(seed=1),
        SftConfig(optim={"lr": 1e-4}),  # type: ignore[arg-type]
        SftConfig(data={"batch_size": 63}),  # type: ignore[arg-type]
        SftConfig(model={"dtype": "bfloat16"}),  # type: ignore[arg-type]
    ):
        assert fingerprint(other) != fingerprint(base)


OVERLONG = {"length_max_tokens": 5, "length_buffer_tokens": 2}
GDPO: dict[str, Any] = {"advantage": "gdpo", "rewards": {"weights": {"reward": 1.0}}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"advantage": "gae"}, "'gae' and a critic go together: set critic"),
        ({"critic": {}}, "'gae' and a critic go together: set advantage"),
        ({"advantage": "distillation", "kl": {}}, "needs a teacher: set kl.reference"),
        ({"distillation": {}, "kl": {"coef": 0.1}}, "needs a teacher: set kl.reference"),
        ({"distillation": {}, "loss": {"type": "sft"}}, "no effect with loss.type = 'sft'"),
        ({"distillation": {}, "loss": {"type": "gspo"}}, "gspo_token', or distillation.divergence = 'full'"),
        ({"distillation": {"divergence": "full"}}, "of which a teacher behind a server"),
        ({"distillation": {}, "kl": {"reference": "t", "refresh_interval": 2}}, "its own teacher"),
        (
            {"advantage": "distillation", "kl": {"reference": "t", "coef": 0.1, "place": "reward"}},
            "is what distillation does",
        ),
        ({"kl": {"coef": 0.1, "estimator": "k1"}}, "gradient that is zero on average"),
        ({"kl": {"target": 6.0}}, "set coef above 0"),
        ({"rewards": {"length_max_tokens": 5}}, "go together: set both or neither"),
        ({"advantage": "pass_at_k"}, "'pass_at_k' and advantage_k go together: set advantage_k"),
        ({"advantage_k": 2}, "'pass_at_k' and advantage_k go together: set advantage, or"),
        ({"advantage_std": "batch"}, "by what advantage = 'grpo' divides, and advantage is 'dr_grpo'"),
        (
            {"advantage": "max_rl", "kl": {"coef": 0.1, "place": "reward"}},
            "kl.place = 'reward' can make negative",
        ),
        ({"advantage": "max_rl", "rewards": OVERLONG}, "which rewards.length_buffer_tokens can make negative"),
        ({"advantage": "max_rl", "reward_model": {"name": "m"}}, "which reward_model can make negative"),
        ({"advantage": "max_rl", "rewards": {"weights": {"reward": 1, "n": -1}}}, "weights below 0 can make negative"),
        ({"environments": {"a": {"advantage": "max_rl"}}, "rewards": OVERLONG}, "length_buffer_tokens can make neg"),
        ({"advantage": "gdpo"}, "name them in rewards.weights"),
        (GDPO | {"kl": {"coef": 0.1, "place": "reward"}}, "so kl.place = 'reward' would have no effect"),
        (GDPO | {"reward_model": {"name": "m"}}, "so reward_model would have no effect"),
        ({"advantage": "gdpo", "rewards": {"weights": {"reward": 1}} | OVERLONG}, "length_buffer_tokens would have no"),
        ({"advantage": "gdpo", "rewards": {"weights": {"reward": 1}, "clip": 1}}, "rewards.clip would have no effect"),
        (
            {"advantage": "gdpo", "rewards": {"weights": {"reward": 1}, "scale": "running"}},
            "scale would have no",
        ),
        ({"advantage": "gae", "critic": {}, "environments": {"a": {}}}, "'gae' needs a model: leave environments out"),
        ({"environments": {"a": {"advantage": "distillation"}}}, "'distillation' needs a model"),
        ({"environments": {"a": {"advantage": "rlo"}}}, "there is no 'rlo'. Did you mean 'rloo'"),
        ({"environments": {"a": {"weight": 0}}}, "greater than 0"),
        ({"model": {"lora": {"dropout": 0.1}}}, "model.lora.dropout = 0.1: engines sample without dropout"),
    ],
)
def test_parts_of_the_trainer_that_do_not_fit_together_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainerConfig.model_validate(values)


def test_settings_of_advantages_may_be_for_one_environment_alone() -> None:
    values = {
        "environments": {"a": {"advantage": "pass_at_k"}, "b": {"advantage": "grpo"}, "c": {"advantage": "own:f"}},
        "advantage_k": 2, "advantage_std": "batch",
    }  # fmt: skip
    config = TrainerConfig.model_validate(values)
    assert config.advantages == ("dr_grpo", "pass_at_k", "grpo", "own:f")
    assert [config.advantage_of(name) for name in "abcd"] == ["pass_at_k", "grpo", "own:f", "dr_grpo"]


def test_max_rl_takes_what_leaves_rewards_positive() -> None:
    values = {"advantage": "max_rl", "rewards": {"clip": 1.0, "scale": "running", "weights": {"exact": 1.0}}, "kl": {}}
    assert TrainerConfig.model_validate(values).advantage == "max_rl"


def test_a_teacher_may_also_hold_the_policy_in_the_loss() -> None:
    kl = {"reference": "teacher", "coef": 0.1, "place": "loss"}
    config = TrainerConfig.model_validate({"advantage": "distillation", "kl": kl})
    assert config.kl is not None and config.distillation == DistillationConfig(coef=1.0)
    assert TrainerConfig.model_validate({"distillation": {"coef": 0.5}, "kl": kl}).advantage == "dr_grpo"


def test_validating_needs_something_to_validate_on() -> None:
    with pytest.raises(ValueError, match="val_interval = 5 needs data.validation_fraction above 0"):
        SftConfig.model_validate({"val_interval": 5})
    assert SftConfig.model_validate({"val_interval": 5, "data": {"validation_fraction": 0.1}}).val_interval == 5


@pytest.mark.parametrize(
    ("command", "changes", "said"),
    [
        (SftConfig, {"ckpt": {"keep_best": "max:"}}, "keep_best = 'max:' names no metric"),
        (SftConfig, {"ckpt": {"weights_only": "a", "resume_dir": "b"}}, "give one of them"),
        (SftConfig, {"model": {"lora": {"target_modules": []}}}, "must name at least one layer, or be 'all-linear'"),
        (SftConfig, {"model": {"lora": {}, "init": "random"}}, "has lora, which adapts pretrained weights, and init"),
        (DpoConfig, {"val_interval": 3}, "val_interval = 3 needs data.validation_fraction above 0, got 0"),
        (
            TrainerConfig,
            {"rewards": {"length_buffer_tokens": 9, "length_max_tokens": 8}},
            r"length_buffer_tokens \(9\) is more than length_max_tokens \(8\)",
        ),
        (TrainerConfig, {"rewards": {"length_buffer_tokens": 9}}, "go together: set both or neither"),
        *(
            (kind, {"prometheus": {"port": 9466}, "dashboard": {}}, "prometheus.port and dashboard.port are both 9466")
            for kind in (SftConfig, DpoConfig, RewardTrainingConfig)
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    command: type[Command], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        command.model_validate(changes)
