"""The trainer of an RL run dies around every call that others can see: weights, metrics, checkpoints, pruning.

It trains a journal that is there already, so that nothing but the trainer decides what comes out.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ModelFactory
from tests.faults.faulty_calls import Call, Instant, read_trail
from tests.faults.orchestrator_runs import Orchestrators
from tests.faults.rl_trainers import Trainers
from tests.rl_runs import assert_same, exact_metrics, outcome
from tests.unit.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving
from triad.manifest import verify
from triad.run_dir import RunDir

pytestmark = pytest.mark.slow

_STEPS = 4
_MOST_TRIALS = 48


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches 1 to 4 of a run, made by the real orchestrator."""
    folder, engine = tmp_path_factory.mktemp("journal") / "run", FakeEngine()
    folder.mkdir()
    with serving(engine), FakeTrainer(RunDir(folder), start=0, max_steps=_STEPS), Orchestrators() as orchestrators:
        assert orchestrators.run(make_config(folder, engine, max_steps=_STEPS)) == 0
    return folder / "rollouts"


class Runs:
    """Runs of one trainer on one journal."""

    def __init__(self, trainers: Trainers, model: Path, journal: Path, folder: Path) -> None:
        self._trainers, self._model, self._journal, self._folder = trainers, model, journal, folder

    def new(self, name: str) -> dict[str, Any]:
        """Return the configuration of a run that was started once and has all batches in its journal."""
        output = self._folder / name
        engine = FakeEngine(url="http://127.0.0.1:9")
        orchestrator = make_config(output, engine, max_steps=_STEPS).model_dump(mode="json", exclude_none=True)
        trainer = {
            "output_dir": str(output),
            "max_steps": _STEPS,
            "model": {"name": str(self._model)},
            "optim": {"lr": 1e-3},
            "parallel": {"threads": 1},
            "ckpt": {"interval": 1, "keep": 2, "resume_step": "auto"},
        }
        config = {"trainer": trainer, "orchestrator": orchestrator}
        assert self._trainers.run(config, trains=False) == 0, self.log(name)
        shutil.copytree(self._journal, output / "rollouts", dirs_exist_ok=True)
        return config

    def log(self, name: str) -> str:
        return (self._folder / name).with_suffix(".log").read_text()


def _instants(calls: list[Call]) -> list[tuple[int, Instant]]:
    """Around renames and the lines of metrics, and evenly over all other calls that are no plain writes."""
    lines = [call for call in calls if call.name == "write" and call.path == "metrics.jsonl"]
    found: list[tuple[int, Instant]] = []
    for call in [*lines, *(call for call in calls if call.name == "rename")]:
        found.append((call.number, "before"))
        found.append((call.number, "after"))
    found.extend((call.number, "half way") for call in lines)
    others = [call for call in calls if call.name not in ("rename", "write")]
    left = max(1, _MOST_TRIALS - len(found))
    found.extend((others[place * len(others) // left].number, "before") for place in range(left))
    return found


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers() as trainers:
        yield trainers


@pytest.mark.timeout(600)
def test_whatever_call_it_dies_at_the_run_comes_out_the_same(
    trainers: Trainers, tiny_model: ModelFactory, journal: Path, tmp_path: Path
) -> None:
    runs = Runs(trainers, tiny_model(), journal, tmp_path)
    straight = RunDir(tmp_path / "straight")
    assert trainers.run(runs.new("straight")) == 0, runs.log("straight")
    expected, lines = outcome(straight, _STEPS), exact_metrics(straight, range(1, _STEPS + 1))
    calls = read_trail(straight.path.with_suffix(".trail"))
    renamed = {call.target.split("/")[0] for call in calls if call.name == "rename"}
    assert {"weights", "checkpoints", "rollouts"} <= renamed, renamed  # published, committed, pruned

    died = 0
    instants = _instants(calls)
    for number, instant in instants:
        name = f"killed_{number}_{instant.replace(' ', '_')}"
        config, run_dir = runs.new(name), RunDir(tmp_path / name)
        code = trainers.run(config, kill_at=number, instant=instant)
        where = f"call {number}, {instant}: {calls[number - 1]}"
        assert code in (-signal.SIGKILL, 0), f"{where}\n{runs.log(name)}"  # 0: this time there were fewer calls
        died += code != 0
        for version in run_dir.published_weights():
            verify(run_dir.weights_of(version))
        assert trainers.run(config) == 0, f"{where}\n{runs.log(name)}"
        assert_same(outcome(run_dir, _STEPS), expected)
        assert exact_metrics(run_dir, range(1, _STEPS + 1)) == lines, where
        shutil.rmtree(run_dir.path)
    assert died > 0.9 * len(instants)
