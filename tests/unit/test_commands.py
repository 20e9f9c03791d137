"""The table of the commands: `holdfast NAME`, `python -m holdfast NAME` and the script NAME are one and the same."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from holdfast import cli, config
from tests.conftest import ROOT

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `holdfast` in this process; return its exit code and what it printed."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *argv])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    return run


def test_every_command_is_installed_by_its_own_name_too() -> None:
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    expected = {name: f"holdfast.cli:{name.replace('-', '_')}" for name in cli.COMMANDS}
    assert scripts == {"holdfast": "holdfast.cli:main", **expected}


def test_every_training_program_has_a_command_of_its_name() -> None:
    of_command = {name: entry[2] for name, entry in cli.COMMANDS.items()}
    for program, configuration in config.PROGRAMS.items():
        assert of_command["trainer" if program == "rl" else program] == configuration


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_the_same_by_either_name(name: str, run_command: Run, holdfast: Run) -> None:
    for words in (["--help"], ["--no-such-flag"]):
        by_itself = run_command(name, *words)
        assert holdfast(name, *words) == by_itself
        assert by_itself[0] == (0 if words == ["--help"] else 2)


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(words: list[str], holdfast: Run) -> None:
    code, out, err = holdfast(*words)
    assert (code, err) == (0, "")
    for name, (summary, _, _) in cli.COMMANDS.items():
        assert f"  {name:<14}{summary}\n" in out


def test_the_version_is_that_of_the_distribution(holdfast: Run) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert holdfast("--version") == (0, f"holdfast {project['version']}\n", "")


def test_an_unknown_command_is_told_with_the_nearest(holdfast: Run) -> None:
    code, out, err = holdfast("rollout", "show")
    assert (code, out) == (2, "")
    assert err.startswith("error: unknown command 'rollout'. Did you mean 'rollouts'? There are: sft, dpo,")


@pytest.mark.parametrize("name", ["reward-model", "no_such_command", "main_"])
def test_only_commands_are_functions_of_the_module(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'holdfast.cli' has no attribute '{name}'"):
        getattr(cli, name)


def test_python_m_holdfast_does_not_import_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("argparse", "pydantic", "tomli", "trainer", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    for flags in ([], ["-P"]):
        argv = [sys.executable, *flags, "-m", "holdfast", "ckpt", "ls", "--output-dir", "none"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith("error: there is no directory none"), done.stderr
