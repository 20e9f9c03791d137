"""Environments of verifiers, played by a process of their own: what they earn, what goes wrong, and how it dies."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import TaskSeed
from holdfast.orchestrator.environments import load_environment
from holdfast.orchestrator.environments.verifiers_environments import Row, Verifiers
from holdfast.orchestrator.main import orchestrate
from holdfast.shared.config.environments import EnvironmentConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.files import journal
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.rollouts import Batch
from tests.runs.interpreters import VERIFIERS_PYTHON, VERIFIERS_TASKS, needs_verifiers
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

STEPS = 3


def args_of(faults: dict[str, str], marks: Path, *, num_letters: int = 10) -> dict[str, Any]:
    """Return the settings of an environment with as many tasks as three steps ask."""
    harness = {"id": "reversing", "faults": faults, "marks": str(marks)}
    return {
        "python": VERIFIERS_PYTHON,
        "taskset": {"num_letters": num_letters},
        "agent": {"harness": harness, "runtime": {"type": "subprocess"}},
    }


def orchestrated(directory: Path, faults: dict[str, str] | None = None, **section: Any) -> list[Batch]:
    """Return the batches of three steps of three tasks each; nothing was sampled twice, and nothing lives on."""
    directory.mkdir()
    engine = FakeEngine()
    run_dir = RunDir(directory / "run")
    environment = {"id": "verifiers:reversing", "args": args_of(faults or {}, directory), **section}
    with serving(engine), FakeTrainer(run_dir, start=0, max_steps=STEPS):
        asyncio.run(
            orchestrate(make_config(run_dir.path, engine, environments=[environment], max_steps=STEPS, group_size=2))
        )
    asked = [(tuple(one["token_ids"]), seed) for one in engine.requests for seed in one["seeds"]]
    assert len(asked) == len(set(asked)), "nothing is sampled twice"
    return [journal.read_batch(run_dir, step) for step in range(1, STEPS + 1)]


@pytest.fixture(autouse=True)
def tasks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(VERIFIERS_TASKS), prepend=os.pathsep)


def test_an_interpreter_without_verifiers_is_refused_with_what_makes_one() -> None:
    told = r"verifiers:x: args.python = '/nowhere/python' cannot be run \(No such file.*`uv venv verifiers-env"
    with pytest.raises(ConfigError, match=told):
        Verifiers("x", {"python": "/nowhere/python"})
    with pytest.raises(ConfigError, match="the process of '/bin/false' that was to play it ended"):
        Verifiers("x", {"python": "/bin/false"})
    if not find_spec("verifiers"):
        section = EnvironmentConfig(id="verifiers:x", args={"python": sys.executable})
        with pytest.raises(ConfigError, match="verifiers is not installed in .*Set args.python to an interpreter"):
            load_environment(section, key="environments[0]")
    with pytest.raises(ConfigError, match=r"args.taskset and args.select must be tables"):
        Verifiers("x", {"select": 3})
    assert not [one for one in psutil.Process().children() if "verifiers_player" in " ".join(one.cmdline())]


@pytest.mark.slow
@needs_verifiers
def test_its_settings_are_those_of_verifiers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_thing.*Extra inputs are not permitted"):
        Verifiers("reversing", {**args_of({}, tmp_path), "no_such_thing": 3})
    environment = Verifiers("reversing", {**args_of({}, tmp_path), "select": {"exclude": {"idx": ["0:2"]}}})
    assert environment.num_tasks == 7
    tasks = [environment.make_task(TaskSeed(0, "mine", index)) for index in range(14)]
    assert sorted(task.row for task in tasks) == sorted([*range(7), *range(7)]), "every task once an epoch"
    assert tasks[3] == environment.make_task(TaskSeed(0, "mine", 3)) and isinstance(tasks[3], Row)


@pytest.mark.slow
@needs_verifiers
def test_its_episodes_are_rollouts_whoever_plays_them_and_dies(tmp_path: Path) -> None:
    here = orchestrated(tmp_path / "here")
    rollouts = [one for batch in here for one in batch.rollouts]
    assert len(rollouts) == 18 and len({one.task_id for one in rollouts}) == 9
    for one in rollouts:
        assert one.loss_mask.num_stretches == 2 and one.metrics["requests/answered"] == 2.0
        assert one.reward == one.metrics["reward/right"] and one.metrics["length"] >= 0.0
    assert len({one.reward for one in rollouts}) > 1, "rewards that tell nothing apart show nothing"
    there = orchestrated(tmp_path / "killed", {"cd": "killed"}, workers=1)
    assert [batch.rollouts for batch in there] == [batch.rollouts for batch in here]
    assert (tmp_path / "killed" / "killed").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # verifiers is imported at every start
@needs_verifiers
def test_what_goes_wrong_in_an_episode_costs_its_group_and_is_told(tmp_path: Path) -> None:
    faults = {"ab": "raises", "cd": "temperature", "ef": "full", "gh": "always killed"}
    batches = orchestrated(tmp_path / "run", faults, on_error="drop")
    details = sorted(one.detail.partition(": run() raised ")[2] for batch in batches for one in batch.dropped)
    assert len(details) == 3 and all(one.reason == "environment_error" for batch in batches for one in batch.dropped)
    assert details[0].startswith("RuntimeError: the episode failed: HarnessError: ") and "'no'" in details[0]
    assert "temperature is the run's" in details[1]
    assert details[2].startswith("RuntimeError: the process that played it has ended 3 times")
    full = [one for batch in batches for one in batch.rollouts if one.metrics["requests/refused/full"]]
    assert [(one.truncated, one.reward) for one in full] == [(True, 0.0)] * 2
    hanging = orchestrated(tmp_path / "hanging", {"cd": "hangs"}, on_error="drop", timeout_s=30.0)
    assert [one.reason for batch in hanging for one in batch.dropped] == ["timeout"]
