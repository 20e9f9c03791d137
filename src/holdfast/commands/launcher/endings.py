"""How processes and runs ended: what died of what, and what a stopped run has saved."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from holdfast.commands.launcher.engine_log import engine_failure
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.supervise import Child, last_lines
from holdfast.shared.config.inference import is_engine
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.errors import NOT_SAVED, STORAGE_FAILED, STUCK, ProcessDied, ReadError
from holdfast.shared.files.run_dir import RunDir


def engine_failure_of(child: Child) -> str | None:
    """Return why the engine of a dead inference server failed; None where something killed either."""
    if not is_engine(child.name) or child.process.returncode < 0:
        return None
    return engine_failure(child.log, begin=child.log_begin)


def how_it_ended(child: Child) -> str:
    """Return by which signal or exit code it ended, in a few words."""
    if child.process.loss is not None:
        return f"is gone: {child.process.loss}"
    code = child.process.returncode
    early = " before its work was done" if code == 0 and not child.is_service else ""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}{early}"


def death_of(child: Child, *, stuck: str | None, restarts: Restarts) -> ProcessDied:
    """Return the error that ends a run because of `child`, with its exit code.

    Args:
        stuck: how it came no further, where it was killed for that.
        restarts: how often it was started again.
    """
    reason = child.error
    failure = engine_failure_of(child)
    if failure is not None:
        said = (reason or f"the engine died, the server {how_it_ended(child)}").removesuffix(" (its log is above)")
        indented = failure.replace("\n", "\n       ")
        error = ProcessDied(f"{child.name}: {said}\n       {indented}\n       log: {child.log}")
    elif reason is not None:
        error = ProcessDied(f"{child.name}: {reason}\n       log: {child.log}")
    elif child.process.loss is not None:
        error = ProcessDied(f"{child.name} {how_it_ended(child)}\n       log: {child.log}")
    elif stuck is not None:
        error = ProcessDied(f"{stuck}\n       log: {child.log}")
    else:
        tail = last_lines(child.log)
        error = ProcessDied(f"{child.name} {how_it_ended(child)}; the last lines of {child.log}:\n{tail}")
    used = restarts.used(child.name)
    if used:
        error.args = (f"{error}\n       it was started again {used} times{restarts.over(child.name)}",)
    code = child.process.returncode
    error.exit_code = 3 if code == STUCK else code if code in (2, 3, STORAGE_FAILED) else 1
    return error


def report_stop(number: int, trainer: Child | None, *, step: int, run_dir: RunDir, config: TrainingCommand) -> int:
    """Say what a stopped run saved; return 128 + signal, or `NOT_SAVED` where its last step is not saved.

    Args:
        number: of the signal.
        trainer: the process, which has ended; None where the storage let none start.
        step: the last one that was trained.
        config: what the trainer was started with.
    """
    stopped = f"stopped at step {step} of {config.max_steps}"
    if config.ckpt is None or trainer is None:
        print(f"{stopped}; nothing was saved (--ckpt saves the step that a signal stops at)")
        return 128 + number
    try:
        steps = run_dir.committed_steps()
    except (OSError, ReadError) as error:
        print(f"{stopped}; whether that is saved cannot be told: {error}")
        return NOT_SAVED
    resume = f"go on from step {steps[-1]} with --ckpt.resume-step latest" if steps else "there is no checkpoint"
    is_saved = (steps[-1] if steps else 0) >= step
    code = trainer.process.returncode
    # 128 + N: it saved for a signal, ours or one that a scheduler sent to its ranks.
    was_killed = code not in (0, *(128 + asked for asked in (signal.SIGTERM, signal.SIGUSR1)))
    if is_saved and was_killed and config.ckpt.dir is not None and step:
        said = trainer.error or f"the trainer {how_it_ended(trainer)} before it had uploaded it"
        print(f"{stopped}; step {step} is saved here, but not at {config.ckpt.dir}: {said}\n{resume}")
        return NOT_SAVED
    if not is_saved or code in (1, 2, 3, STORAGE_FAILED):
        what = f"step {step} is saved here, but" if is_saved else f"step {step} was NOT saved:"
        print(f"{stopped}; {what} {trainer.error or f'see {trainer.log}'}\n{resume}")
        return NOT_SAVED
    print(f"{stopped}, which is saved; {resume}" if step else f"{stopped}, before anything was trained")
    return 128 + number


def profile_lines(run_dir: RunDir, config: TrainingCommand) -> list[str]:
    """Return where the profile lies, for people, where one was asked for and came about."""
    if config.profile is None:
        return []
    try:
        return [f"profile: {path} (open it in https://ui.perfetto.dev)" for path in run_dir.profiles()]
    except OSError as error:
        return [f"which profiles there are cannot be told: {error}"]


@dataclass(frozen=True)
class End:
    """What is left of a run that has ended.

    Attributes:
        lines: for people, behind what says how it ended.
        fields: the same for programs.
    """

    lines: list[str]
    fields: dict[str, Any]


def end_of(run_dir: RunDir, config: TrainingCommand, *, step: int, exit_code: int) -> End:
    """Return where the last checkpoint is, and how the run goes on from it."""
    fields: dict[str, Any] = {"step": step, "max_steps": config.max_steps, "checkpoint": None, "resume": None}
    lines = []
    is_finished = exit_code == 0
    weights = run_dir.weights_of(step)
    # Not `Path.is_dir`, which raises where the storage fails.
    is_there = is_finished or os.path.isdir(weights)  # noqa: PTH112
    fields["weights"] = str(weights) if is_there else None
    if not is_finished and exit_code < 128 and exit_code != NOT_SAVED:
        lines.append(f"ended at step {step} of {config.max_steps}, by an error")
    try:
        steps = run_dir.committed_steps()
    except (OSError, ReadError) as error:
        return End([*lines, f"which checkpoints there are cannot be told: {error}"], fields)
    if not steps:
        # Who made a mistake on the command line wants to read that, and nothing else.
        if not step:
            return End([], fields)
        if exit_code < 128:  # a run that was stopped has said so
            lines.append("no checkpoint was saved: a run that is to go on later needs --ckpt.interval N")
        return End(lines, fields)
    last = run_dir.checkpoint(steps[-1])
    resume = "--ckpt.resume-step latest"
    fields |= {"checkpoint": {"step": steps[-1], "path": str(last)}, "resume": resume}
    longer = " and a larger --max-steps" if is_finished and steps[-1] >= config.max_steps else ""
    lines.append(f"last checkpoint: step {steps[-1]} in {last}; go on: the same command with {resume}{longer}")
    return End(lines, fields)
