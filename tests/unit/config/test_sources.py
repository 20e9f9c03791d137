"""Flags over the environment over files over defaults: who wins, what an error says, and where a setting came from."""

import ast
import json
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic_settings import BaseSettings

from docs_tools.listing import SETTINGS
from holdfast.config import RlConfig, SftConfig
from holdfast.config.base import Command
from holdfast.config.help import variable_of
from holdfast.config.load import parse_command_line, read_toml, to_toml
from holdfast.config.rl import hand_down_shared
from holdfast.config.sources import VARIABLES, _root_of
from holdfast.errors import ConfigError
from holdfast.launcher.resume.attempt import Attempt, write_config
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import describe_variables, read_settings
from tests.conftest import ROOT

# command, key: three values that differ from the default and from one another, and one that is refused (None: any
# text is allowed). A value is given as TOML holds it.
TABLE: list[tuple[str, str, tuple[Any, Any, Any], Any]] = [
    ("sft", "max_steps", (7, 8, 9), 0), ("sft", "seed", (1, 2, 3), -1), ("sft", "output_dir", ("a", "b", "c d"), ""),
    ("sft", "clean", (True, True, True), "perhaps"), ("sft", "deterministic", (True, True, True), 3),
    ("sft", "log_format", ("json", "json", "json"), "xml"), ("sft", "keep_attempts", (3, "all", 5), 0),
    ("sft", "epochs", (0.5, 2.0, 3.0), 0), ("sft", "data.seq_len", (32, 64, 128), 0),
    ("sft", "model.name", ("a/b", "c/d", "e"), None),
    ("sft", "model.dtype", ("float32", "bfloat16", "float32"), "float16"), ("sft", "model.lora.rank", (4, 8, 32), 0),
    ("sft", "model.lora.target_modules", ("all-linear", ["q_proj", "v_proj"], ["k_proj"]), [3]),
    ("sft", "optim.lr", (1e-3, 2e-3, 3e-3), "fast"),
    ("sft", "optim.betas", ([0.1, 0.2], [0.3, 0.4], [0.5, 0.6]), [1, 2, 3]),
    ("sft", "optim.schedule", ("cosine", "constant", "linear"), "cosin"), ("sft", "optim.warmup_steps", (3, 4, 5), -1),
    ("sft", "data.batch_size", (2, 4, 6), 0), ("sft", "data.pack", (False, True, False), "no way"),
    ("sft", "ckpt.interval", (2, 3, 4), 0), ("sft", "ckpt.resume_step", (10, "latest", "auto"), "newest"),
    ("sft", "ckpt.save_async", (False, True, False), "soon"), ("sft", "ckpt.keep", (3, 4, 5), 0),
    ("dpo", "loss.beta", (0.2, 0.3, 0.4), -1), ("dpo", "data.name", ("x.jsonl", "y.jsonl", "z.jsonl"), None),
    ("rl", "max_steps", (7, 8, 9), "many"), ("rl", "async_level", (0, 2, 3), -1),
    ("rl", "share_gpus", (True, False, True), "both"), ("rl", "max_restarts", (1, 2, 0), -1),
    ("rl", "cluster", ("ray", "slurm", "ray"), "k8s"), ("rl", "trainer.optim.lr", (1e-3, 2e-3, 3e-3), 0),
    ("rl", "trainer.row_tokens", (512, 256, 128), 1), ("rl", "trainer.loss.clip_high", (0.3, 0.4, 0.5), -1),
    ("rl", "trainer.kl.coef", (0.1, 0.2, 0.3), "much"), ("rl", "trainer.parallel.num_ranks", (2, 3, 4), 0),
    ("rl", "orchestrator.group_size", (2, 4, 6), 0), ("rl", "orchestrator.sampling.temperature", (0.5, 0.6, 0.7), -1),
    ("rl", "orchestrator.environments", ([{"id": "a"}], [{"id": "b"}, {"id": "c"}], [{"id": "d"}]), [{"di": "a"}]),
    ("rl", "inference.server.port", (8001, 8002, 8003), 70000),
    ("rl", "inference.engine.max_num_seqs", (8, 16, 32), 0),
    ("orchestrator", "environments", ([{"id": "a"}], [{"id": "b"}], [{"id": "c"}]), {"id": 3}),
    ("inference", "server.host", ("0.0.0.0", "127.0.0.2", "127.0.0.3"), None),
    ("trainer", "journal.keep", (3, "all", 5), -1),
]  # fmt: skip


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def in_file(path: Path, key: str, value: Any) -> str:
    path.write_text(tomli_w.dumps(reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)))
    return str(path)


def found(config: Any, key: str) -> Any:
    value = reduce(lambda one, name: getattr(one, name) if one is not None else None, key.split("."), config)
    if isinstance(value, tuple):
        return list(value)
    return [{"id": one.id} for one in value] if isinstance(value, list) and value and hasattr(value[0], "id") else value


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def refused(command: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(SETTINGS[command], list(argv))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("command", "key", "values", "bad"), TABLE, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_flag_wins_over_the_environment_over_a_file_over_the_default(
    command: str, key: str, values: tuple[Any, Any, Any], bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = SETTINGS[command], variable_of(key)
    flag = f"--{key.replace('_', '-')}"
    below, above, highest = values
    file = in_file(tmp_path / "file.toml", key, below)

    def parsed(*argv: str) -> Command:
        config = parse_command_line(kind, list(argv))
        assert type(config) is kind and not isinstance(config, BaseSettings), "what is handed on reads no source again"
        return config

    assert plain(found(parsed(), key)) != below
    assert plain(found(parsed("@", file), key)) == below and not parsed("@", file).variables
    monkeypatch.setenv(name, text_of(above))
    config = parsed("@", file)
    assert plain(found(config, key)) == above and set(config.variables.values()) == {name}
    assert plain(found(parsed(), key)) == above and any(name in line for line in describe_variables(config))
    config = parsed("@", file, f"{flag}={text_of(highest)}")
    assert plain(found(config, key)) == highest and not config.variables
    monkeypatch.delenv(name)
    assert plain(found(parsed(f"{flag}={text_of(highest)}"), key)) == highest
    if bad is None:
        return
    bad_file = in_file(tmp_path / "bad.toml", key, bad)
    assert bad_file in refused(command, "@", bad_file)
    assert f"flag {flag}" in refused(command, "@", file, f"{flag}={text_of(bad)}")
    monkeypatch.setenv(name, text_of(bad))
    assert f"variable {name}" in refused(command, "@", file)


def test_nested_lists_and_tables_come_from_one_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = in_file(tmp_path / "rl.toml", "orchestrator", {"environments": [{"id": "a"}], "group_size": 4})
    given = [{"id": "reverse_text", "args": {"min_length": 3, "words": ["a", None], "B": {"c": 1.5}}}, {"id": "b"}]
    monkeypatch.setenv("HOLDFAST_ORCHESTRATOR__ENVIRONMENTS", json.dumps(given))
    monkeypatch.setenv("HOLDFAST_TRAINER__OPTIM", '{"lr": 0.5, "schedule": "linear"}')
    monkeypatch.setenv("HOLDFAST_TRAINER__OPTIM__LR", "0.25")  # of a section and its setting, the setting wins
    monkeypatch.setenv("HOLDFAST_TRAINER__ENVIRONMENTS", '{"Sums": {"weight": 2}}')
    config = parse_command_line(RlConfig, ["@", file])
    first, second = config.orchestrator.environments
    assert (first.id, first.args, second.id) == ("reverse_text", given[0]["args"], "b")
    assert config.orchestrator.group_size == 4, "a list is replaced, its section added to"
    assert (config.trainer.optim.lr, config.trainer.optim.schedule) == (0.25, "linear")
    assert config.trainer.environments["Sums"].weight == 2
    assert config.variables["trainer.optim.schedule"] == "HOLDFAST_TRAINER__OPTIM"
    assert config.variables["trainer.optim.lr"] == "HOLDFAST_TRAINER__OPTIM__LR"


def test_only_a_variable_that_decided_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_OPTIM", '{"lr": 0.5, "warmup_steps": 2}')
    monkeypatch.setenv("HOLDFAST_CKPT__INTERVAL", "3")
    monkeypatch.setenv("HOLDFAST_MAX_STEPS", "3")
    config = parse_command_line(SftConfig, ["--optim", '{"lr": 0.25}', "--ckpt", "null", "--epochs", "2"])
    assert (config.optim.lr, config.optim.warmup_steps, config.ckpt, config.epochs) == (0.25, 2, None, 2)
    assert config.variables == {"optim.warmup_steps": "HOLDFAST_OPTIM"}


def test_a_key_that_is_there_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'lr' occurs twice" in refused("sft", "--optim", '{"lr": 1, "lr": 2}')
    monkeypatch.setenv("HOLDFAST_OPTIM", '{"lr": 1, "lr": 2}')
    assert "'lr' occurs twice" in refused("sft")


def test_null_and_switches_in_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = in_file(tmp_path / "sft.toml", "ckpt", {"interval": 3})
    monkeypatch.setenv("HOLDFAST_CKPT", "null")
    assert parse_command_line(SftConfig, ["@", file]).ckpt is None
    monkeypatch.setenv("HOLDFAST_CKPT__KEEP", "3")
    assert "HOLDFAST_CKPT unsets the section that variable HOLDFAST_CKPT__KEEP sets" in refused("sft")
    monkeypatch.delenv("HOLDFAST_CKPT")
    for text, value in (("true", True), ("FALSE", False), ("1", True), ("no", False)):
        monkeypatch.setenv("HOLDFAST_DATA__PACK", text)
        assert parse_command_line(SftConfig, []).data.pack is value
    monkeypatch.setenv("HOLDFAST_DATA__PACK", "")
    assert "variable HOLDFAST_DATA__PACK" in refused("sft")


@pytest.mark.parametrize(("command", "name", "said"), [
    ("rl", "HOLDFAST_MAX_STEPSS", "Did you mean 'HOLDFAST_MAX_STEPS'?"),
    ("rl", "HOLDFAST_LR", "Did you mean 'HOLDFAST_TRAINER__OPTIM__LR'?"),
    ("sft", "HOLDFAST_TRAINER__OPTIM__LR", "Did you mean 'HOLDFAST_OPTIM__LR'?"),
    ("rl", "HOLDFAST_TRAINER__OPTIM__LRR", "unknown key 'trainer.optim.lrr'. Did you mean 'lr'?"),
    ("rl", "HOLDFAST_LEARNING_RATE", "Did you mean 'HOLDFAST_TRAINER__OPTIM__LR'?"),
    ("rl", "HOLDFAST_ORCHESTRATOR__ENVIRONMENTS__0__ID", "HOLDFAST_ORCHESTRATOR__ENVIRONMENTS='[{...}]'"),
    ("rl", "HOLDFAST_TRAINER__ENVIRONMENTS__Sums__WEIGHT", "HOLDFAST_TRAINER__ENVIRONMENTS='{...}'"),
    ("rl", "HOLDFAST_max_steps", "write it in capitals, HOLDFAST_MAX_STEPS."),
    ("rl", "HOLDFAST_TRAINER.OPTIM.LR", "write it in capitals, HOLDFAST_TRAINER__OPTIM__LR."),
    ("rl", "HOLDFAST_UNLIKE_ANY", "no setting 'unlike_any'"),
    ("rl", "HOLDFAST_", "sets nothing"),
])  # fmt: skip
def test_a_variable_that_sets_nothing_is_refused_by_name(
    command: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "5")
    message = refused(command)
    assert f"variable {name}" in message and said in message


def test_variables_without_the_prefix_set_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEED", "MAX_STEPS", "OPTIM__LR", "holdfast_seed", "Holdfast_MAX_STEPS", "XHOLDFAST_SEED"):
        monkeypatch.setenv(name, "17")
    config = parse_command_line(SftConfig, [])
    assert config == SftConfig() and config.seed == 0 and not config.variables


def test_variables_that_are_not_settings_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HOLDFAST_MY_TOKEN", "s3cr3t")
    assert "HOLDFAST_MY_TOKEN" in refused("inference")
    assert not parse_command_line(SETTINGS["inference"], ["--server.admin-token-env", "HOLDFAST_MY_TOKEN"]).variables


def test_every_variable_of_the_code_is_known() -> None:
    """A process of a run that parses a command line would be refused by the variables of its own launcher."""
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {node.value} if re.fullmatch(r"HOLDFAST_[A-Z_]+[A-Z]", node.value) else set()
    assert named == VARIABLES


def test_no_log_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    value = '[{"id": "a", "args": {"api_key": "s3cr3t", "url": "https://me:s3cr3t@host/x"}}]'
    monkeypatch.setenv("HOLDFAST_ORCHESTRATOR__ENVIRONMENTS", value)
    config = parse_command_line(RlConfig, [])
    assert config.orchestrator.environments[0].args["api_key"] == "s3cr3t"
    shown = "\n".join(describe_variables(config))
    assert "orchestrator.environments" in shown and "s3cr3t" not in shown
    monkeypatch.setenv("HOLDFAST_ORCHESTRATOR__ENVIRONMENTS", value[:-1])
    assert "s3cr3t" not in refused("rl")
    for broken in (
        value.replace('"id"', '"di"'),
        '[{"id": "a", "args": "s3cr3t"}]',
        '[{"id": "a", "seq_len": "s3cr3t"}]',
    ):
        monkeypatch.setenv("HOLDFAST_ORCHESTRATOR__ENVIRONMENTS", broken)
        message = refused("rl")
        assert "s3cr3t" not in message and "variable HOLDFAST_ORCHESTRATOR__ENVIRONMENTS" in message


def test_resolved_settings_say_what_came_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_MAX_STEPS", "12")
    monkeypatch.setenv("HOLDFAST_TRAINER__OPTIM__LR", "0.25")
    config = hand_down_shared(
        parse_command_line(RlConfig, ["--model.name", "x", "--orchestrator.environments", '{"id": "a"}'])
    )
    attempt = Attempt(RunDir(tmp_path), 1, None)
    for name, process, lines in (
        ("trainer", config.trainer, ["# max_steps: from the environment variable HOLDFAST_MAX_STEPS",
                                     "# optim.lr: from the environment variable HOLDFAST_TRAINER__OPTIM__LR"]),
        ("orchestrator", config.orchestrator, ["# max_steps: from the environment variable HOLDFAST_MAX_STEPS"]),
        ("inference", config.inference, []),
    ):  # fmt: skip
        path = write_config(attempt, name, process, dry_run=False)
        assert [line for line in path.read_text().splitlines()[1:] if line.startswith("#")] == lines
        read_settings(path)  # the checksum holds for the remarks as well
        assert to_toml(read_toml(type(process), path)) == to_toml(process)


def test_a_process_of_a_run_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(to_toml(SftConfig(max_steps=3)))
    monkeypatch.setenv("HOLDFAST_MAX_STEPS", "12")
    assert read_toml(SftConfig, tmp_path / "sft.toml").max_steps == 3
    assert RlConfig.model_validate({"trainer": {}}).max_steps is None


@pytest.mark.parametrize("command", SETTINGS)
def test_the_settings_of_every_command_are_those_of_the_framework(command: str) -> None:
    root = _root_of(SETTINGS[command])
    assert issubclass(root, BaseSettings) and root.model_fields.keys() == SETTINGS[command].model_fields.keys()


def test_steps_in_a_variable_replace_the_epochs_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = in_file(tmp_path / "sft.toml", "epochs", 2.0)
    monkeypatch.setenv("HOLDFAST_MAX_STEPS", "12")
    config = parse_command_line(SftConfig, ["@", file])
    assert (config.max_steps, config.epochs) == (12, None)
    config = parse_command_line(SftConfig, ["@", file, "--epochs", "3"])
    assert (config.model_fields_set & {"max_steps", "epochs"}, config.epochs) == ({"epochs"}, 3)


def test_help_needs_no_framework() -> None:
    code = "import sys; from holdfast.cli import run; run('rl', ['--help']); print('pydantic' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("False\n") and "HOLDFAST_" in out


RL = ("@", "configs/reverse_text/rl.toml")


def handed_down(*argv: str) -> RlConfig:
    return hand_down_shared(parse_command_line(RlConfig, [*RL, *argv]))


@pytest.mark.usefixtures("in_root")
def test_a_flag_or_variable_of_a_process_is_not_lost_against_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file sets `max_steps` of `rl` itself, which wins over the value of a process."""
    for argv in (("--trainer.max-steps", "9"), ("--trainer.ckpt.keep", "7"), ("--trainer.ckpt", "null")):
        with pytest.raises(ConfigError, match=f"flag {argv[0]} has no effect"):
            handed_down("--ckpt.keep", "3", *argv)
    monkeypatch.setenv("HOLDFAST_TRAINER__MAX_STEPS", "9")
    with pytest.raises(ConfigError, match="variable HOLDFAST_TRAINER__MAX_STEPS has no effect"):
        handed_down()
    config = handed_down("--max-steps", "8")
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (8, 8)
    assert not config.trainer.variables, "the flag decided"
    monkeypatch.setenv("HOLDFAST_MAX_STEPS", "7")
    with pytest.raises(ConfigError, match="flag --trainer.max-steps has no effect"):
        handed_down("--trainer.max-steps", "8")


@pytest.mark.usefixtures("in_root")
def test_processes_that_get_a_setting_know_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TRAINER__SEED", "4")
    config = handed_down()
    for process in (config.trainer, config.orchestrator, config.inference):
        assert (process.seed, process.variables) == (4, {"seed": "HOLDFAST_TRAINER__SEED"})


@pytest.mark.usefixtures("in_root")
def test_the_type_of_a_shared_section_comes_from_wherever_it_is_set(tmp_path: Path) -> None:
    path = tmp_path / "weights.toml"
    path.write_text("[weights]\n")
    config = handed_down("@", str(path), "--trainer.weights.transport", "collective")
    assert config.trainer.weights.transport == "collective"


@pytest.mark.parametrize(("name", "value", "argv", "said"), [
    ("TRAINER__OPTIM", '{"lr": "abc"}', (), "variable HOLDFAST_TRAINER__OPTIM: 'trainer.optim.lr'"),
    ("ORCHESTRATOR__TEACHER__MODE", "logprobs", (), "variable HOLDFAST_ORCHESTRATOR__TEACHER__MODE: 'orch"),
    ("SEED", "3", ("--trainer.optim", '{"lr": "abc"}'), "flag --trainer.optim: 'trainer.optim.lr'"),
    ("TRAINER__LOSS__TYPE", "nosuch", (), "variable HOLDFAST_TRAINER__LOSS__TYPE: there is no 'nosuch'"),
    ("CKPT", "null", ("--ckpt.interval", "3"), "HOLDFAST_CKPT unsets the section that flag --ckpt.interval sets"),
])  # fmt: skip
@pytest.mark.usefixtures("in_root")
def test_an_error_names_who_gave_the_value_and_not_a_file_below(
    name: str, value: str, argv: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HOLDFAST_{name}", value)
    message = refused("rl", *RL, *argv)
    assert said in message and "rl.toml" not in message


def test_null_is_read_as_any_type_of_a_section_reads_it() -> None:
    correction = "--trainer.loss.correction"
    config = parse_command_line(RlConfig, [f"{correction}.type", "mask", f"{correction}.high", "null"])
    assert config.trainer.loss.correction.type == "mask"


def test_a_file_without_its_sign_is_told() -> None:
    assert " @ configs/x.toml" in refused("rl", "configs/x.toml")
    assert "@ FILE.toml" in refused("rl", "--config", "x.toml")
