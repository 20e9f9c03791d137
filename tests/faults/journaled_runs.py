"""Runs of the trainer of `rl` on a journal that is there already: nothing but the trainer decides what comes out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from holdfast.shared.files.run_dir import RunDir
from tests.faults.orchestrator_runs import Orchestrators
from tests.faults.rl_trainers import Trainers
from tests.unit.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

STEPS = 4


def make_journal(folder: Path) -> Path:
    """Return batches 1 to 4 of a run in the new directory `folder`, made by the real orchestrator."""
    engine = FakeEngine()
    folder.mkdir()
    with serving(engine), FakeTrainer(RunDir(folder), start=0, max_steps=STEPS), Orchestrators() as orchestrators:
        code = orchestrators.run(make_config(folder, engine, max_steps=STEPS))
    assert code == 0, folder.with_suffix(".log").read_text()
    return folder / "rollouts"


class Runs:
    """Runs of one trainer on one journal."""

    def __init__(self, trainers: Trainers, model: Path, journal: Path, folder: Path) -> None:
        self._trainers, self._model, self._journal, self._folder = trainers, model, journal, folder

    def new(self, name: str, **settings: Any) -> dict[str, Any]:
        """Return the configuration of a run that was started once and has all batches in its journal.

        Args:
            settings: of the trainer.
        """
        output = self._folder / name
        config = self.config_of(output, **settings)
        assert self._trainers.run(config, trains=False) == 0, self.log(name)
        shutil.copytree(self._journal, output / "rollouts", dirs_exist_ok=True)
        return config

    def config_of(self, output: Path, **settings: Any) -> dict[str, Any]:
        """Return the configuration of a run in `output`, as it lies there."""
        engine = FakeEngine(url="http://127.0.0.1:9")
        orchestrator = make_config(output, engine, max_steps=STEPS).model_dump(mode="json", exclude_none=True)
        trainer = {
            "output_dir": str(output),
            "max_steps": STEPS,
            "model": {"name": str(self._model)},
            "optim": {"lr": 1e-3},
            "parallel": {"threads": 1},
            "ckpt": {"interval": 1, "keep": 2, "resume_step": "auto"},
            "journal": {"keep": 0},  # so that batches are removed, and the trainer is killed at that as well
            **settings,
        }
        return {"trainer": trainer, "orchestrator": orchestrator}

    def log(self, name: str) -> str:
        return (self._folder / name).with_suffix(".log").read_text()
