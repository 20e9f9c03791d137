"""Runs of `trainer` on a journal that is there already: nothing but the trainer decides what comes out."""

import shutil
from pathlib import Path
from typing import Any

import tomli_w

from tests.faults.orchestrators import run_undisturbed
from tests.forking.commands import Run, shared_commands
from tests.servers.orchestrator_fakes import FakeEngine, serving

STEPS = 4


def make_journal(folder: Path) -> Path:
    """Return batches 1 to 4 of a run in the new directory `folder`, made by the real orchestrator."""
    engine = FakeEngine()
    with serving(engine):
        run_undisturbed(folder, engine, STEPS)
    return folder / "rollouts"


class Trainers:
    """Runs on one model and one journal, in directories of one folder."""

    def __init__(self, model: Path, journal: Path, folder: Path) -> None:
        self._model, self._journal, self._folder = model, journal, folder

    def prepare(self, name: str, **settings: Any) -> Path:
        """Return the configuration of a run that was started once and has all batches in its journal. `settings`: of
        the trainer."""
        config = {
            "output_dir": str(self._folder / name), "max_steps": STEPS, "model": {"name": str(self._model)},
            "optim": {"lr": 1e-3}, "parallel": {"threads": 1},
            "ckpt": {"interval": 1, "keep": 2, "resume_step": "auto"}, "journal": {"keep": 0}, **settings,
        }  # fmt: skip
        path = self._folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(config))
        run = _start(path, until="prepared").succeed()
        shutil.copytree(self._journal, run.output / "rollouts", dirs_exist_ok=True)
        return path


def run_trainer(config: Path) -> Run:
    """Run one to its end, in the directory that has the name of its configuration."""
    return _start(config).wait()


def _start(config: Path, **options: Any) -> Run:
    return shared_commands().start("trainer", config.with_suffix(""), ["@", str(config)], **options)
