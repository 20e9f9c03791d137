"""One start of a run: where it starts from, and the settings of its processes, which the next one looks at."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from holdfast.config.base import Command
from holdfast.config.load import to_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.training import TrainingCommand
from holdfast.launcher.resume.config_diff import compare_settings, describe_stretch, settings_of
from holdfast.launcher.resume.fork import Fork
from holdfast.run import atomic, checked
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.run_dir import INPUTS_NAME, RunDir
from holdfast.run.settings import read_settings

T = TypeVar("T", bound=TrainingCommand | OrchestratorConfig)
CONFIG_NAME = "config.toml"


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1 for the first start in this directory.
        resume_step: the committed step to go on from; None for a fresh start.
        checkpoint: directory of that step, in this run or in the one that is forked.
        fork: the checkpoint of another run that this run begins with.
        inputs: what it computes with beside its settings, by content; empty if it is not to be noted.
        to_go_on: what the user does to go on with the run after this attempt, in words.
    """

    run_dir: RunDir
    number: int
    resume_step: int | None
    checkpoint: Path | None = None
    fork: Fork | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    to_go_on: str = "give the same command again"

    @property
    def start(self) -> str:
        """How the attempt starts, in a few words."""
        if self.resume_step is None:
            return "from scratch"
        return f"from step {self.resume_step}" + (f" of {self.checkpoint}" if self.fork else "")


def with_resume(config: T, resume_step: int | None) -> T:
    """Return `config` with the resolved step in place of `latest`, `auto` or another run's checkpoint."""
    config = config.model_copy(deep=True)
    if config.ckpt is not None:
        config.ckpt.resume_step = resume_step
        config.ckpt.resume_dir = None
        # The step has weights of its own.
        if resume_step is not None:
            config.ckpt.weights_only = None
    return config


def write_config(attempt: Attempt, name: str, config: Command, *, dry_run: bool, tells: bool = True) -> Path:
    """Write the resolved configuration of one process, say what differs from before, and return its path.

    Args:
        tells: False: what differs is nothing to tell, or was told already.
    """
    if dry_run and attempt.run_dir.path == Path(os.devnull):
        return attempt.run_dir.path
    directory = attempt.run_dir.path / "configs" / "dry_run" if dry_run else attempt.run_dir.configs(attempt.number)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.toml"
    if attempt.inputs and not dry_run:
        atomic.write_file(directory / INPUTS_NAME, checked.encode(attempt.inputs))
    atomic.write_file(path, checked.with_first_line(to_toml(config)))  # whole, or not at all
    if attempt.resume_step is not None and tells:
        _say_what_differs(attempt, name, config)
    return path


def _say_what_differs(attempt: Attempt, name: str, config: Command) -> None:
    """Print how `config` differs from what the checkpoint was made with, or else from the last attempt."""
    before, since = attempt.run_dir.configs(attempt.number - 1) / f"{name}.toml", "the last attempt"
    if isinstance(config, TrainingCommand) and attempt.checkpoint is not None:
        saved = attempt.checkpoint / TRAINER_DIR / CONFIG_NAME
        if saved.exists():
            before, since = saved, f"the checkpoint of step {attempt.resume_step}"
    if not before.exists():
        return
    old, new = read_settings(before), settings_of(config)
    for line in compare_settings(old, new).describe(name, since):
        print(line)
    if isinstance(config, TrainingCommand):
        stretched = describe_stretch(old, config, step=attempt.resume_step or 0)
        if stretched is not None:
            print(stretched)


def last_started(run_dir: RunDir, number: int, names: Sequence[str]) -> Path | None:
    """Return the configurations of the newest attempt before `number` that may have started a process.

    A launcher that was killed before it had written them all has started nothing, so changed nothing.
    """
    for earlier in range(number - 1, 0, -1):
        directory = run_dir.configs(earlier)
        if all((directory / f"{name}.toml").exists() for name in names):
            return directory
    return None
