"""Where an attempt starts: afresh or from a checkpoint, and what of the run directory still holds then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from triad.config.base import CkptConfig, Command
from triad.config.drift import describe_drift
from triad.config.load import read_toml, to_toml
from triad.config.orchestrator import OrchestratorConfig
from triad.config.trainer import TrainingCommand
from triad.errors import ConfigError, RunDirError
from triad.run_dir import RunDir, resolve_resume_step

T = TypeVar("T", bound=TrainingCommand | OrchestratorConfig)


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1 for the first start in this directory.
        resume_step: the committed step to go on from; None for a fresh start.
    """

    run_dir: RunDir
    number: int
    resume_step: int | None


def prepare(
    config: Command,
    ckpt: CkptConfig | None,
    *,
    max_steps: int,
    clean: bool,
    dry_run: bool,
    orchestrator: OrchestratorConfig | None = None,
) -> Attempt:
    """Take the run directory, decide where to resume, and set aside what that supersedes.

    Args:
        orchestrator: for RL runs: what makes the batches; decides whether journaled ones still hold.

    Raises:
        RunDirError: the directory is in use, or holds a run and neither resume nor --clean was asked.
        CheckpointError: the step to resume from is not there.
    """
    run_dir = RunDir(config.output_dir)
    wanted = ckpt.resume_step if ckpt else None
    if clean and wanted is not None:
        raise ConfigError("--clean removes what --ckpt.resume-step needs: give one of them")
    if not dry_run:
        run_dir.lock()
    if clean and not dry_run:
        run_dir.remove_run()
    if wanted is None and run_dir.holds_run() and not clean:
        steps = run_dir.committed_steps()
        resume = f"resume it with --ckpt.resume-step latest (step {steps[-1]})" if steps else "it has no checkpoint"
        raise RunDirError(
            f"{run_dir.path} already holds a run: {resume}, choose another directory with --output-dir, "
            "or remove the run with --clean."
        )
    resume_step = resolve_resume_step(run_dir, wanted)
    if resume_step is not None and resume_step > max_steps:
        raise ConfigError(
            f"max_steps = {max_steps} lies before step {resume_step}, which the run would go on from. "
            f"Raise --max-steps, or resume from one of: {', '.join(map(str, run_dir.committed_steps()))}."
        )
    attempt = Attempt(run_dir, run_dir.next_attempt(), resume_step)
    if not dry_run:
        _settle(attempt, keep_journal=orchestrator is not None and _journal_holds(attempt, orchestrator))
    return attempt


def _journal_holds(attempt: Attempt, config: OrchestratorConfig) -> bool:
    """Whether batches behind the resumed step are the ones that this attempt would make itself.

    They are when nothing after that step was ever committed and what makes batches has not changed.
    """
    steps = attempt.run_dir.committed_steps()
    if (steps[-1] if steps else None) != attempt.resume_step:
        return False
    previous = attempt.run_dir.configs(attempt.number - 1) / "orchestrator.toml"
    if not previous.exists():
        return False
    free = {"max_steps", "ckpt", "output_dir", "dry_run", "client", "weights_timeout_s"}
    before = read_toml(OrchestratorConfig, previous)
    return before.model_dump(exclude=free) == config.model_dump(exclude=free)


def _settle(attempt: Attempt, *, keep_journal: bool) -> None:
    """Bring the directory into the state that the attempt starts from, and say what that changed."""
    run_dir = attempt.run_dir
    for path in run_dir.clear_leftovers():
        print(f"removed {path.relative_to(run_dir.path)}: it was never committed")
    if not run_dir.holds_run():
        run_dir.create()
        return
    step = attempt.resume_step or 0
    moved = run_dir.set_aside_after(step, attempt.number, keep_journal=keep_journal)
    if moved:
        print(
            f"set aside in {run_dir.discarded(attempt.number).relative_to(run_dir.path)}, as it lies after step {step}:"
        )
        print("  " + ", ".join(str(path.relative_to(run_dir.discarded(attempt.number))) for path in moved))
    replayed = [number for number in run_dir.published_batches() if number > step]
    if replayed:
        print(f"batches {replayed[0]} to {replayed[-1]} are in the journal: they are trained again, not made again")
    start = f"resuming from step {attempt.resume_step}" if attempt.resume_step is not None else "starting afresh"
    print(f"{start} in {run_dir.path} (attempt {attempt.number})")


def with_resume(config: T, resume_step: int | None) -> T:
    """Return `config` with the resolved step in place of `latest` or `auto`."""
    config = config.model_copy(deep=True)
    if config.ckpt is not None:
        config.ckpt.resume_step = resume_step
    return config


def write_config(attempt: Attempt, name: str, config: Command, *, dry_run: bool) -> Path:
    """Write the resolved configuration of one process, say what changed, and return its path."""
    directory = attempt.run_dir.path / "configs" / "dry_run" if dry_run else attempt.run_dir.configs(attempt.number)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.toml"
    path.write_text(to_toml(config))
    before = attempt.run_dir.configs(attempt.number - 1) / path.name
    if attempt.resume_step is not None and name != "rl" and before.exists():
        for line in describe_drift(before, path):
            print(f"changed since the last attempt: {name}: {line}")
    return path
