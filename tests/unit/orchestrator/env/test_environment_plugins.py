"""Environments of installed packages: found by entry point, refused where a name is taken, else nobody's trouble."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config.environments import EnvironmentConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError, EnvironmentFailure
from holdfast.orchestrator.check_environments import check_environments
from holdfast.orchestrator.env.interface import Environment, TaskSeed
from holdfast.orchestrator.env.registry import load_environment

SOUND = '''
from holdfast import Environment, Message, Task


class Knock(Environment):
    """Who is there?"""

    def __init__(self, word: str = "knock") -> None:
        self.word = word

    def make_task(self, seed):
        return Task(prompt=[Message("user", self.word)])

    def score(self, task, sessions):
        raise AssertionError("a check scores nothing")
'''
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with entry points where an installer puts it, in a directory of the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(package: str, entries: dict[str, str], *, at: Path = site, **modules: str) -> Path:
        info = at / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[holdfast.environments]", *lines, ""]))
        for name, text in modules.items():
            (at / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        return info

    return install


def load(name: str, **args: object) -> Environment:
    return load_environment(EnvironmentConfig(id=name, args=args), key="environments[0]")


def test_an_environment_of_a_package_is_found_by_its_name(install: Install) -> None:
    install("door-games", {"knock": "door_games:Knock"}, door_games=SOUND)
    assert load("knock", word="hello").make_task(TaskSeed(0, "knock", 0)).prompt[0].content == "hello"  # type: ignore[union-attr]
    check_environments(OrchestratorConfig(environments=[EnvironmentConfig(id="knock")]))
    with pytest.raises(ConfigError, match="Knock has no such argument. Did you mean 'word'"):
        load("knock", words="hello")
    with pytest.raises(ConfigError, match=r"Did you mean 'knock'\? Allowed: reverse_text, .*jsonl, knock, "):
        load("knoc")


def test_a_file_of_that_name_in_the_working_directory_takes_nothing_away(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("door-games", {"knock": "door_games:Knock"}, door_games=SOUND)
    here = tmp_path / "here"
    install("in-the-working-directory", {"unpacked": "door_games:Knock"}, at=here, door_games="raise SystemExit(1)")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])  # as after the import of a user's module
    assert load("knock").make_task(TaskSeed(0, "knock", 0)).prompt
    with pytest.raises(ConfigError, match="there is no environment 'unpacked'"):
        load("unpacked")


def test_a_name_of_ours_or_of_two_packages_is_refused_and_all_others_go_on(install: Install) -> None:
    install("impostor", {"reverse_text": "impostor:Knock", "knock": "impostor:Knock"}, impostor=SOUND)
    with pytest.raises(ConfigError) as caught:
        load("reverse_text")
    message = str(caught.value)
    assert message.startswith(
        "environments[0].id: 'reverse_text' is an environment of holdfast itself and of impostor 1.0"
    )
    for name in ("impostor:Knock", "holdfast.orchestrator.env.reverse_text:ReverseText"):
        assert f"'{name}'" in message
        assert load(name)
    assert load("knock")
    install("second", {"knock": "second_games:Knock"}, second_games=SOUND)
    with pytest.raises(ConfigError, match=r"of impostor 1.0 and of second 1.0 .*'impostor:Knock' or 'second_"):
        load("knock")
    assert load("second_games:Knock")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("broken_games:Knock", EnvironmentFailure, r"RuntimeError: out of order \(.*broken_games.py:1\)"),
        ("needy_games:Knock", EnvironmentFailure, "importing needy_games failed: No module named 'no_such_library'"),
        ("absent_games:Knock", ConfigError, "no module 'absent_games'. games 1.0 registers 'absent_games:Knock'"),
        ("door_games:Knok", ConfigError, "door_games has no environment 'Knok'. Did you mean 'Knock'"),
        ("door_games", ConfigError, "door_games has no environment ''. Environments there: Knock."),
    ],
)  # fmt: skip
def test_a_broken_one_fails_only_who_asks_for_it(
    target: str, error: type[Exception], message: str, install: Install
) -> None:
    modules = {
        "broken_games": "raise RuntimeError('out of order')",
        "needy_games": "import no_such_library",
        "door_games": SOUND,
    }
    install("games", {"broken": target, "knock": "door_games:Knock [extra]"}, **modules)
    assert load("knock") and load("reverse_text")
    with pytest.raises(error, match=message):
        load("broken")
