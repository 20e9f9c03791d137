"""Flags: help, those of other programs and misspelt ones, what was given, and the table of the docs."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli
from pydantic import BaseModel

from docs_tools import listing
from docs_tools.listing import SETTINGS
from holdfast.config import DpoConfig, RlConfig, SftConfig, help, program_config
from holdfast.config.flags import flags_of
from holdfast.config.given import check_given
from holdfast.config.help import hint, names_elsewhere
from holdfast.config.load import parse_command_line, read_toml, to_toml
from holdfast.config.marks import models_in
from holdfast.config.training import SupervisedCommand
from holdfast.errors import ConfigError
from tests.builders.toy import TOY
from tests.conftest import ROOT

COMMANDS = {"sft": SftConfig, "dpo": DpoConfig, "rl": RlConfig}
KEYS = {name: [flag.key for flag in flags_of(command).values()] for name, command in COMMANDS.items()}

# Flags of TRL: what is said by `sft`, `dpo` and `rl`. A word that begins with a capital letter begins a sentence.
TRL = {
    "learning_rate": ("optim.lr", "optim.lr", "trainer.optim.lr"),
    "warmup_ratio": ("Here optim.warmup_steps counts",) * 3,
    "num_train_epochs": ("epochs", "epochs", "Here a run has max_steps"),
    "per_device_train_batch_size": ("data.micro_batch_size", "data.micro_batch_size", "Here a batch is"),
    "packing": ("data.pack", "data.pack", "Here rows always"), "save_steps": ("ckpt.interval",) * 3,
    "push_to_hub": ("Here nothing is uploaded",) * 3, "beta": ("", "loss.beta", "trainer.kl.coef"),
    "max_completion_length": ("", "", "orchestrator.sampling.max_tokens"), "reward_funcs": ("Here tasks",) * 3,
}  # fmt: skip

# Keys of prime-rl: what `rl` says.
PRIME_RL = {
    "orchestrator.batch_size": "Here a batch is", "max_async_level": "async_level",
    "wandb.project": "tracking.project", "trainer.model.tp": "Here the trainer has no tensor", "val.interval": "",
    "trainer.optim.learning_rate": "trainer.optim.lr", "bench": "",
}  # fmt: skip


def _expected(said: str, *, flag: bool) -> str:
    if not said or said[0].isupper():
        return said and f" {said}"
    return f" Did you mean '--{said.replace('_', '-')}'?" if flag else f" Did you mean '{said}'?"


@pytest.mark.parametrize("name", TRL)
def test_flags_of_trl(name: str) -> None:
    for command, said in zip(COMMANDS, TRL[name], strict=True):
        wanted = _expected(said, flag=True)
        given = hint(f"--{name}", KEYS[command])
        assert given.startswith(wanted) and bool(given) == bool(wanted), (command, given)


@pytest.mark.parametrize("name", PRIME_RL)
def test_keys_of_prime_rl(name: str) -> None:
    wanted = _expected(PRIME_RL[name], flag=False)
    given = hint(name, KEYS["rl"])
    assert given.startswith(wanted) and bool(given) == bool(wanted), given


def test_every_name_of_another_system_stands_for_settings_that_there_are() -> None:
    known = {key for keys in KEYS.values() for key in keys}
    alone = {key.partition(".")[2] for key in KEYS["rl"]}  # of `trainer`, `orchestrator` and `inference`
    for theirs, one in names_elsewhere().items():
        assert (one["settings"] or one["said"]) and set(one["settings"]) <= known | alone, theirs


OPTION = re.compile(r"`([\w.]+)`(?: \(`?([\w.-]+)`?\))?")


def rows() -> list[dict[str, str]]:
    section = (ROOT / "docs" / "coming_from.md").read_text().split("\n## RL\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def options(cell: str) -> list[tuple[str, str]]:
    """Names and the defaults in brackets behind them; empty where there are none."""
    return [(name, default) for name, default in OPTION.findall(cell)]


def found(config: type[BaseModel], key: str) -> Any:
    """The default of a dotted key, also below sections that are unset."""
    name, _, rest = key.partition(".")
    assert name in config.model_fields, f"{key}: {config.__name__} has no {name}"
    field = config.model_fields[name]
    if not rest:
        return field.default
    models, inner = models_in(field.annotation)[0], rest.partition(".")[0]
    return found(next((model for model in models if inner in model.model_fields), models[0]), rest)


def equal(value: Any, text: str) -> bool:
    return str(value) == text or (isinstance(value, float) and float(text) == value)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[""])
def test_what_the_table_calls_ours_is_there_and_has_that_default(row: dict[str, str]) -> None:
    assert options(row["here"])
    for name, default in options(row["here"]):
        value = found(RlConfig, name if name.startswith("orchestrator.") else f"trainer.{name}")
        assert not default or equal(value, default), f"{name} is {value}"


@pytest.mark.trl
def test_what_the_table_says_of_trl_is_there_and_has_that_default() -> None:
    from trl import GRPOConfig

    known = {field.name: field.default for field in fields(GRPOConfig)}
    for row in rows():
        for name, default in options(row["TRL"]):
            if name[0].isupper() or "." in name:
                continue  # a trainer of its own
            assert name in known, name
            assert not default or equal(known[name], default), f"{name} is {known[name]}"


@pytest.mark.trl
def test_the_script_for_trl_has_names_that_trl_knows() -> None:
    from trl import GRPOConfig

    script = ast.parse((ROOT / "docs" / "coming_from.md").read_text().split("```python\n")[1].split("```")[0])
    calls = [node for node in ast.walk(script) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    (config,) = (call for call in calls if getattr(call.func, "id", "") == "GRPOConfig")
    given = {keyword.arg for keyword in config.keywords}
    assert len(given) > 8 and given <= {field.name for field in fields(GRPOConfig)}


def said(command: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_given(command, parse_command_line(SETTINGS[command], list(argv)))
    return str(caught.value)


@pytest.mark.parametrize("command", SETTINGS)
def test_without_anything_a_command_says_how_to_begin(command: str, in_root: Path) -> None:
    first, *lines = said(command).splitlines()
    assert first.startswith(f"{command} needs ") and "model.name" in first and len(lines) <= 3
    assert all(line.strip().startswith(f"uv run {command}") for line in lines) and lines[-1].endswith("--help")


@pytest.mark.parametrize(("command", "file", "right"), [
    ("sft", "rl", "rl"), ("rl", "sft", "sft"), ("sft", "dpo", "dpo"), ("dpo", "reward_model", "reward-model"),
    ("rl", "evaluate", "evaluate"), ("rl", "orch", "rl --orchestrator"),
])  # fmt: skip
def test_a_file_of_another_command_is_told_with_it(command: str, file: str, right: str, in_root: Path) -> None:
    path = f"configs/reverse_text/{file}.toml"
    with pytest.raises(ConfigError) as refused:
        parse_command_line(COMMANDS[command], ["@", path], command)
    assert f"{path} has settings of `{right.split()[-1].strip('-')}`" in str(refused.value)
    assert str(refused.value).endswith(f"\n  uv run {right} @ {path}")


@pytest.mark.parametrize(("argv", "said"), [
    (["--model", "some/model"], "--model is a section of settings. Did you mean --model.name some/model?"),
    (
        ["--eval.environments", "reverse_text"],
        """an object of settings, such as {"id": VALUE}, got "reverse_text\"""",
    ),
])  # fmt: skip
def test_a_plain_value_in_the_place_of_settings_is_told_with_the_setting(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_command_line(SftConfig, argv)


@pytest.mark.usefixtures("in_tmp_path")
def test_outside_a_checkout_no_file_is_promised() -> None:
    shipped, own, _ = said("sft").splitlines()[1:]
    assert "in a checkout of holdfast" in shipped and own.strip().startswith("sft --model.name")


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model", "rl", "orchestrator"])
def test_one_that_is_missing_is_named_with_the_way_to_give_it(command: str) -> None:
    flags = TOY[command]
    for left_out, there in ((flags[:2], flags[2:4]), (flags[2:4], flags[:2])):
        message = said(command, *there)
        key = left_out[0].removeprefix("--")
        assert message.startswith(f"{key} is needed: ") and left_out[0] in message and there[0] not in message
    check_given(command, parse_command_line(SETTINGS[command], list(flags)))


def test_steps_and_epochs_exclude_each_other_and_a_flag_wins_over_a_file(tmp_path: Path) -> None:
    assert "give one of them" in said("sft", *TOY["sft"], "--epochs", "2")
    path = tmp_path / "sft.toml"
    for there, flag in (("max_steps = 9", "--epochs"), ("epochs = 9", "--max-steps")):
        path.write_text(there)
        config = parse_command_line(SETTINGS["sft"], ["@", str(path), *TOY["sft"][:4], flag, "3"])
        check_given("sft", config)
        assert isinstance(config, SupervisedCommand) and {config.max_steps, config.epochs} <= {0, 3, None}


@pytest.mark.parametrize(
    ("program", "whole", "adapters", "schedule", "warmup"),
    [("sft", 2e-5, 2e-4, "linear", 20), ("dpo", 1e-6, 1e-5, "linear", 20),
     ("reward-model", 1e-5, 1e-4, "linear", 20), ("rl", 1e-6, 1e-5, "constant", 0)],
)  # fmt: skip
def test_rates_fit_the_program_and_what_is_given_wins(
    program: str, whole: float, adapters: float, schedule: str, warmup: int, tmp_path: Path
) -> None:
    def optim(**settings: Any) -> Any:
        config = program_config(program).model_validate({"max_steps": 200, **settings})
        (tmp_path / "resolved.toml").write_text(to_toml(config))
        assert read_toml(type(config), tmp_path / "resolved.toml").optim == config.optim, "it is stored as it is"
        return config.optim

    lora = {"model": {"lora": {}}}
    assert (optim().lr, optim().schedule, optim().warmup_steps) == (whole, schedule, warmup)
    assert (optim(**lora).lr, optim(**lora).warmup_steps) == (adapters, warmup)
    given = {"lr": whole, "schedule": "cosine", "warmup_steps": 3}
    assert {name: getattr(optim(**lora, optim=given), name) for name in given} == given
    assert optim(optim={"schedule": "constant"}).warmup_steps == 0
    kept = program_config(program).model_validate({"max_steps": 200, "optim": {"lr": 0.5}})
    kept.settle_rates({"lr": 0.25, "schedule": "cosine", "warmup_steps": 7})
    assert (kept.optim.lr, kept.optim.schedule, kept.optim.warmup_steps) == (0.5, "cosine", 7)


SUMMARY = "What it does."


def test_the_list_is_what_the_settings_say() -> None:
    assert listing.FILE.read_text() == listing.text_of_listing(), "run `python -m docs_tools.listing`"


@pytest.mark.parametrize("command", listing.SETTINGS)
def test_help_fits_on_a_screen_and_names_what_there_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help.text(command, SUMMARY, ["--help"])
    lines = text.splitlines()
    assert len(lines) <= 60 and SUMMARY in lines
    sections = help._sections(command)
    keys = {one["key"] for section in sections.values() for one in section["settings"]}
    assert set(help.first(command)["settings"]) <= keys
    for name, section in sections.items():
        assert not name or f"{name} {len(section['settings'])}" in " ".join(text.split())
    if command != "evaluate":
        assert all(f"uv run {example}" in text for example in help.first(command)["examples"])


@pytest.mark.parametrize("command", listing.SETTINGS)
def test_help_all_has_every_setting_that_is_not_handed_down(command: str) -> None:
    text = help.text(command, SUMMARY, ["--help-all"])
    shown = {word for word in text.split() if word.startswith("--")}
    shared = json.loads(listing.FILE.read_text())["shared"].items()
    handed_down = [f"--{process}.{name}".replace("_", "-") for process, names in shared for name in names]
    for word, flag in flags_of(listing.SETTINGS[command]).items():
        hidden = command == "rl" and any(word == one or word.startswith(f"{one}.") for one in handed_down)
        if not word.startswith("--no-") and not flag.is_section and not hidden:
            assert word in shown or f"[{flag.key}[]]" in text, word
    for words in ("(undefined)", "None", "null", "JSON string"):
        assert f"default {words}" not in text


def test_help_of_a_section_a_setting_and_of_nothing() -> None:
    section = help.text("rl", SUMMARY, ["--help", "trainer.loss"])
    assert "--trainer.loss.clip-high" in section and "--trainer.loss.correction.level" in section
    assert "--trainer.optim.lr" not in section
    for words in (["--help", "trainer.optim.lr"], ["--help", "--trainer.optim.lr"]):
        assert help.text("rl", SUMMARY, words).count("--trainer.optim.") == 1
    assert help.text("rl", SUMMARY, ["--help", "loss"]) == section, "by its last part"
    by_end = help.text("rl", SUMMARY, ["--help", "max-grad-norm"])
    assert re.findall(r"--[\w.-]+", by_end) == [f"--trainer.{one}optim.max-grad-norm" for one in ("", "critic.")]
    for name, meant in (("trainer.los", "trainer.loss"), ("learning_rate", "trainer.optim.lr")):
        with pytest.raises(ConfigError, match=rf"Did you mean '{meant}'\?"):
            help.text("rl", SUMMARY, ["--help", name])
    assert help.text("rl", SUMMARY, ["--help", "@", "x.toml"]) == help.text("rl", SUMMARY, ["-h"])


def test_defaults_of_sections_that_are_off_do_not_read_as_if_they_were_on() -> None:
    text = help.text("rl", SUMMARY, ["--help"])
    assert "--trainer.model.lora.rank (off; 16) " in text and " LoRA: rank of the adapters\n" in text
    assert "--trainer.optim.lr (" in text and "--trainer.optim.lr (off" not in text


@pytest.mark.parametrize(
    ("command", "file"),
    [("rl", "rl"), ("sft", "sft"), ("dpo", "dpo"), ("reward-model", "reward_model"), ("trainer", "train"),
     ("orchestrator", "orch"), ("inference", "infer"), ("evaluate", "evaluate")],
)  # fmt: skip
def test_the_schema_takes_the_shipped_files_and_no_unknown_key(command: str, file: str) -> None:
    schema = json.loads(listing.json_schema(command))
    content = tomli.loads((ROOT / "configs" / "reverse_text" / f"{file}.toml").read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError, match="learning_rate"):
        jsonschema.validate({**content, "learning_rate": 1}, schema)
    described = [schema, *schema["$defs"].values()]
    assert all(one.get("description") for table in described for one in table.get("properties", {}).values())
