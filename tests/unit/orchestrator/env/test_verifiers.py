"""Environments of verifiers, played by a process of their own: what they earn, what goes wrong, and how it dies."""

import asyncio
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import Endpoint, Score, TaskSeed
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure
from holdfast.orchestrator.env import verifiers
from holdfast.orchestrator.env.registry import load_environment
from holdfast.orchestrator.env.verifiers import PlayerDied, Row, Verifiers
from holdfast.protocol.rollouts import Batch
from tests.conftest import ROOT
from tests.runs.interpreters import VERIFIERS_PYTHON, VERIFIERS_TASKS, needs_verifiers
from tests.runs.processes import command_line
from tests.servers.orchestrator_fakes import played
from tests.unit.orchestrator.env.test_harness import session_of

STEPS = 3


def args_of(faults: dict[str, str], marks: Path, *, num_letters: int = 10) -> dict[str, Any]:
    """Return the settings of an environment with as many tasks as three steps ask."""
    agent = {"harness": {"id": "reversing", "faults": faults, "marks": str(marks)}, "runtime": {"type": "subprocess"}}
    return {"python": VERIFIERS_PYTHON, "taskset": {"num_letters": num_letters}, "agent": agent}


def orchestrated(directory: Path, faults: dict[str, str] | None = None, **section: Any) -> list[Batch]:
    """Return the batches of three steps of three tasks each."""
    directory.mkdir()
    environment = {"id": "verifiers:reversing", "args": args_of(faults or {}, directory), **section}
    return played(directory, environment, max_steps=STEPS, group_size=2)


@pytest.fixture(autouse=True)
def tasks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(VERIFIERS_TASKS), prepend=os.pathsep)


def test_an_interpreter_without_verifiers_is_refused_with_what_makes_one() -> None:
    told = r"verifiers:x: args.python = '/nowhere/python' cannot be run \(No such file.*`uv venv verifiers-env"
    with pytest.raises(ConfigError, match=told):
        Verifiers("x", {"python": "/nowhere/python"})
    with pytest.raises(ConfigError, match="the process of '/bin/false' that was to play it ended with exit code 1;"):
        Verifiers("x", {"python": "/bin/false"})
    if not find_spec("verifiers"):
        section = EnvironmentConfig(id="verifiers:x", args={"python": sys.executable})
        with pytest.raises(ConfigError, match="verifiers is not installed in .*Set args.python to an interpreter"):
            load_environment(section, key="environments[0]")
    with pytest.raises(ConfigError, match=r"args.taskset and args.select must be tables"):
        Verifiers("x", {"select": 3})
    assert not [one for one in psutil.Process().children() if "verifiers_player" in " ".join(command_line(one))]


@pytest.mark.launch
@needs_verifiers
def test_settings_are_those_of_verifiers_and_what_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no_such_thing.*Extra inputs are not permitted"):
        Verifiers("reversing", {**args_of({}, tmp_path), "no_such_thing": 3})
    for fault, told in {
        "raises": r"FileNotFoundError: no such data \(.*/reversing.py:\d+\). It ran in ",
        "exits": r"SystemExit: no key \(.*/reversing.py:\d+\)",
        "starts": r"RuntimeError: no port \(.*/reversing.py:\d+\)",
    }.items():
        with pytest.raises(ConfigError, match=f"^verifiers:reversing: {told}"):
            Verifiers("reversing", {**args_of({}, tmp_path), "taskset": {"fault": fault}})
    (tmp_path / "needy.py").write_text("import no_such_module\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    told = r"taskset 'needy' not found .*No module named 'no_such_module' \(.*/needy.py:1"
    with pytest.raises(ConfigError, match=told):
        Verifiers("needy", args_of({}, tmp_path))
    environment = Verifiers("reversing", {**args_of({}, tmp_path), "select": {"exclude": {"idx": ["0:2"]}}})
    assert environment.num_tasks == 7
    tasks = [environment.make_task(TaskSeed(0, "mine", index)) for index in range(14)]
    assert sorted(task.row for task in tasks) == sorted([*range(7), *range(7)]), "every task once an epoch"
    assert tasks[3] == environment.make_task(TaskSeed(0, "mine", 3)) and isinstance(tasks[3], Row)


@pytest.mark.launch
@pytest.mark.timeout(900)  # verifiers is imported at every start
@needs_verifiers
def test_what_goes_wrong_in_an_episode_costs_its_group_and_is_told(tmp_path: Path) -> None:
    faults = {"ab": "raises", "cd": "temperature", "ef": "full", "gh": "always exits"}
    batches = orchestrated(tmp_path / "run", faults, on_error="drop")
    details = sorted(one.detail.partition(": run() raised ")[2] for batch in batches for one in batch.dropped)
    assert len(details) == 3 and all(one.reason == "environment_error" for batch in batches for one in batch.dropped)
    assert details[0].startswith("RuntimeError: the episode failed: HarnessError: ") and "'no'" in details[0]
    assert "temperature is set by the run" in details[1]
    assert details[2].startswith("RuntimeError: the process that played it has ended 3 times")
    full = [one for batch in batches for one in batch.rollouts if one.metrics["requests/refused/full"]]
    assert [(one.truncated, one.reward) for one in full] == [(True, 0.0)] * 2
    hanging = orchestrated(tmp_path / "hanging", {"cd": "hangs"}, on_error="drop", timeout_s=30.0)
    assert [one.reason for batch in hanging for one in batch.dropped] == ["timeout"]


def plain(directory: Path, monkeypatch: pytest.MonkeyPatch, *starts: str) -> Verifiers:
    """Return an environment that `tests/servers/plain_player.py` plays."""
    monkeypatch.setattr(verifiers, "_PLAYER", ROOT / "tests" / "servers" / "plain_player.py")
    for name in ("began", "go", "asked", "cancelled"):
        os.mkfifo(directory / name)
    return Verifiers("x", {"python": sys.executable, "directory": str(directory), "starts": list(starts)})


def scored(environment: Verifiers, row: int) -> Score:
    session = session_of(["ba<|end|>"])

    async def play() -> list[Score]:
        await environment.run(session, Row(prompt="", row=row))
        return await environment.score(Row(prompt="", row=row), [session])

    [score] = asyncio.run(play())
    return score


NOBODY = Endpoint("http://127.0.0.1:9/v1", "key", None)  # pyright: ignore[reportArgumentType]
"""For tasks that ask nothing."""


def test_a_killed_player_is_started_again_and_nobody_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["killed", *["falls"] * 4, "killed", "plays"]
    assert scored(plain(tmp_path, monkeypatch, *words), 1) == Score(float(len(words)), {"length": 1.0})
    monkeypatch.setattr(verifiers, "MOST_KILLED", 1)
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match="the process that was to play it was killed 1 times in a row"):
        plain(tmp_path / "again", monkeypatch, "killed")


def test_a_stopped_player_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_LOOK_S", 0.05)
    environment = plain(tmp_path, monkeypatch, "plays", "stops", "plays")
    process = environment._player._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert scored(environment, 1).reward == 3.0
    environment._player.close()


def test_a_player_that_cannot_start_is_started_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = plain(tmp_path, monkeypatch, *["plays", "exits", "other", "refuses", "plays", *["plays"] * 3])
    assert scored(environment, 1) == Score(1.0, {"length": 1.0})
    with pytest.raises(PlayerDied):
        asyncio.run(environment._player.play(0, NOBODY, is_alone=False))
    with pytest.raises(ConfigError, match="the process of '.*' that was to play it ended"):
        scored(environment, 1)
    with pytest.raises(EnvironmentFailure, match="has other tasks after its process was started again"):
        scored(environment, 1)
    with pytest.raises(ConfigError, match="no such thing"):
        scored(environment, 1)
    assert scored(environment, 1).reward == 5.0
    with pytest.raises(RuntimeError, match="so$"):
        scored(environment, 3)
    with pytest.raises(RuntimeError, match="the process that played it has ended 3 times"):
        scored(environment, 0)
    assert scored(environment, 1).reward == 8.0
    tasks = [environment.make_task(TaskSeed(0, "mine", index)) for index in range(8)]
    assert sorted(task.row for task in tasks) == sorted([*range(4), *range(4)]), "every task once an epoch"
    environment._player.close()


def test_who_leaves_a_starting_player_leaves_it_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = plain(tmp_path, monkeypatch, "plays", "waits", "waits", "plays")
    player = environment._player

    async def begun() -> asyncio.Task[dict[str, Any]]:
        """Return a rollout that waits for a player that is being loaded."""
        with pytest.raises(PlayerDied):
            await player.play(0, NOBODY, is_alone=False)
        asking = asyncio.create_task(player.play(2, NOBODY, is_alone=False))
        await asyncio.to_thread((tmp_path / "began").read_text)
        return asking

    async def left() -> None:
        asking = await begun()
        other = asyncio.create_task(player.play(2, NOBODY, is_alone=False))
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.to_thread((tmp_path / "go").write_text, "x")
        await asyncio.to_thread((tmp_path / "asked").read_text)
        assert asking.cancelled() and not other.done()
        other.cancel()
        assert await asyncio.to_thread((tmp_path / "cancelled").read_text) == "0", "told to the player"

    async def ended() -> None:
        await begun()

    asyncio.run(left())
    asyncio.run(ended())
    assert player._process is None, "nobody was left to wait for it"
    assert scored(environment, 1).reward == 4.0
    player.close()


def test_a_rollout_cancelled_while_its_player_dies_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = plain(tmp_path, monkeypatch, "plays")._player

    async def both() -> None:
        link = await player._linked()
        asking = asyncio.create_task(link.play(2, NOBODY))
        await asyncio.sleep(0)
        link._reading.cancel()
        asking.cancel()
        await asyncio.wait([asking])
        assert link.is_over and asking.cancelled()

    asyncio.run(both())
    player.close()
