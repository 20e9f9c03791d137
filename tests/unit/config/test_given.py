"""What a command cannot do without is asked for, with the lines that begin a run; rates that fit it are filled in."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs_tools.listing import SETTINGS
from holdfast.config import program_config
from holdfast.config.given import check_given
from holdfast.config.load import parse_command_line, read_toml, to_toml
from holdfast.config.training import SupervisedCommand
from holdfast.errors import ConfigError
from tests.builders.toy import TOY


def said(command: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_given(command, parse_command_line(SETTINGS[command], list(argv)))
    return str(caught.value)


@pytest.mark.parametrize("command", SETTINGS)
def test_without_anything_a_command_says_how_to_begin(command: str, in_root: Path) -> None:
    first, *lines = said(command).splitlines()
    assert first.startswith(f"{command} needs ") and "model.name" in first and len(lines) <= 3
    assert all(line.strip().startswith(f"uv run {command}") for line in lines) and lines[-1].endswith("--help")


def test_outside_a_checkout_no_file_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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


def test_nothing_heavy_is_imported_to_say_so() -> None:
    code = (
        "import sys\nfrom holdfast import cli\n"
        "try:\n    cli.run('sft', [])\nfinally:\n    print({*sys.modules} & {'torch', 'numpy', 'transformers', 'vllm'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ConfigError: sft needs" in done.stderr and done.stdout == "set()\n"


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
