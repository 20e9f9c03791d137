"""What a command cannot do without is asked for, with the lines that begin a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs_tools.listing import SETTINGS
from holdfast.config.given import check_given
from holdfast.config.load import parse_command_line
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
        "try:\n    cli.run('sft', [])\nfinally:\n    print({*sys.modules} & {'torch', 'numpy'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ConfigError: sft needs" in done.stderr and done.stdout == "set()\n"
