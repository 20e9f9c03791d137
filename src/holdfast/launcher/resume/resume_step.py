"""Resolves `ckpt.resume_step` to a step by number or to the newest intact step, and moves away what it supersedes.

Later steps and damaged checkpoints move to `discarded/attempt_K`; unpublished batches are deleted. The attempt trains
on journaled batches that it can keep, instead of sampling them again.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from holdfast.config.base import CkptConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.load import read_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.resolved import fingerprint, makes_same_batches
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import TrainingCommand
from holdfast.errors import CheckpointError, ConfigError, DataError, ReadError, RunDirError
from holdfast.launcher.resume.attempt import Attempt, last_started
from holdfast.protocol.rollouts import fault_of_batch, vocab_size_in
from holdfast.run import atomic
from holdfast.run.checkpoints import Entry, newest_intact, verify_checkpoint
from holdfast.run.choose_run import command_line
from holdfast.run.journal import read_batch
from holdfast.run.manifest import Verification
from holdfast.run.run_dir import RunDir, number_of, numbered_paths


def resolve_resume_step(
    run_dir: RunDir,
    wanted: int | Literal["latest", "auto"] | None,
    *,
    how: Verification = "full",
    say: Callable[[str], None] = print,
    again: bool = False,
) -> int | None:
    """Return the verified step to resume from, or None for a fresh start. Raise CheckpointError if the step is missing,
    damaged, or of another run; the error lists the others. Raise ReadError if the step cannot be read. An older one
    does not replace it.

    Args:
        wanted: `ckpt.resume_step`: a step, `latest` or -1, `auto`, or None. `latest` and `auto` pass over damaged
            steps; a number does not.
        how: `full` reads every byte; `size` compares sizes only.
        say: gets which steps were skipped and why.
        again: this process has started the run before, so pass over a step of another run that came meanwhile.
    """
    if wanted is None:
        return None
    entries = run_dir.entries()
    steps = [entry.step for entry in entries if entry.status == "committed"]
    foreign = {entry.step: entry for entry in entries if entry.status == "foreign"}
    if wanted not in ("latest", "auto", -1):
        if wanted in foreign:
            raise _refused(foreign[wanted], wanted)
        step = _checked(run_dir, int(wanted), steps, is_there=wanted in [entry.step for entry in entries], how=how)
        _pass_over(foreign.values(), step, wanted, say=say, again=again)
        return step

    def check(step: int) -> None:
        try:
            verify_checkpoint(run_dir.checkpoint(step), how=how, step=step, to_resume=True)
        except ReadError as error:
            others = ", ".join(str(other) for other in steps if other < step) or "none"
            raise ReadError(
                f"ckpt.resume_step = {wanted}: {error}. It may be whole, so no older step replaces step "
                f"{step}. Mend the storage, or choose one by number: {others}."
            ) from error

    # Unreadable and damaged ones, too, which must stop the resume or be named.
    there_are = [entry.step for entry in entries if entry.step not in foreign]
    newest, damaged = newest_intact(there_are, check, say=lambda text: say(f"WARNING: {text}"))
    _pass_over(foreign.values(), newest, wanted, say=say, again=again)
    if newest is not None:
        return newest
    if damaged:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted}: every checkpoint is damaged: {'; '.join(damaged)}. "
            f"`{command_line('ckpt verify', run_dir.path)}` says more; put a copy in their place, or choose another "
            "directory with --output-dir"
        )
    if wanted == "auto":
        return None
    raise CheckpointError(
        f"ckpt.resume_step = {wanted}: nothing to resume in {run_dir.checkpoints}: {_listing(steps)}. "
        "Use `auto` to start from scratch if there is none."
    )


def _pass_over(
    foreign: Iterable[Entry], step: int | None, wanted: int | str, *, say: Callable[[str], None], again: bool
) -> None:
    """Name the checkpoints of other runs. Raise CheckpointError for a checkpoint after `step`, which would be in the
    way of a save, except if the run was started before."""
    for entry in sorted(foreign, key=lambda entry: entry.step, reverse=True):
        if not again and (step is None or entry.step > step):
            raise _refused(entry, wanted)
        say(f"WARNING: skipping step {entry.step}: {entry.reason}")


def _refused(entry: Entry, wanted: int | str) -> CheckpointError:
    return CheckpointError(
        f"ckpt.resume_step = {wanted}: {entry.reason}. Move it away to continue the run that is here. To continue "
        f"from that step, start a run with another --output-dir and --ckpt.resume-dir {entry.path}."
    )


def _checked(run_dir: RunDir, wanted: int, steps: list[int], *, is_there: bool, how: Verification) -> int:
    if not is_there:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted} is not in {run_dir.checkpoints}: {_listing(steps)}."
            + ("" if steps else " Leave --ckpt.resume-step out to start from scratch, or correct --output-dir.")
        )
    try:
        verify_checkpoint(run_dir.checkpoint(wanted), how=how, step=wanted, to_resume=True)
    except CheckpointError as error:
        others = ", ".join(str(step) for step in steps if step != wanted) or "none"
        raise CheckpointError(
            f"ckpt.resume_step = {wanted}: {error}. Choose another step; other committed steps: {others}."
        ) from None
    except ReadError as error:
        raise ReadError(f"ckpt.resume_step = {wanted}: {error}. Mend the storage, or choose another step.") from error
    return wanted


def _listing(steps: list[int]) -> str:
    return f"committed steps: {', '.join(map(str, steps))}" if steps else "it has no committed checkpoint"


def set_aside_damaged(run_dir: RunDir, attempt: int) -> list[tuple[Path, str]]:
    """Move damaged checkpoints, which were whole once, to `discarded/attempt_K`; return new paths and reasons."""
    damaged = [entry for entry in run_dir.entries() if entry.status == "damaged"]
    return [(set_aside(run_dir, entry.path, attempt), entry.reason) for entry in damaged]


def set_aside_after(
    run_dir: RunDir, step: int, attempt: int, *, last_batch: int | None = None, exports_again: bool = True
) -> list[Path]:
    """Move what is later than `step` to `discarded/attempt_K`; return the new paths.

    Checkpoints, weights, batches, evaluations and lines of metrics.jsonl move.

    Args:
        exports_again: the trainer publishes the weights of `step` again at its start, and they are deleted here.
        last_batch: batches up to this one stay, to be trained again, and the generations of the next one.
    """
    until = {
        # First: as long as later checkpoints are here, `last_kept_batch` keeps none of them after a kill.
        run_dir.rollouts: step if last_batch is None else last_batch,
        run_dir.checkpoints: step,
        run_dir.weights: step,
        # Evaluations of versions that sampled a batch that is kept, or that sample the next batch.
        run_dir.evaluations: step if last_batch is None else last_batch,
    }
    later = [
        path
        for parent, last in until.items()
        for path in numbered_paths(parent)
        # The log after the last kept batch belongs to the next batch: its answers still hold.
        if number_of(path) > last + (path.suffix == ".log" and last_batch is not None)
    ]
    moved = [set_aside(run_dir, path, attempt) for path in later]
    if exports_again and run_dir.weights_of(step).exists():
        atomic.remove_directory(run_dir.weights_of(step))
    if run_dir.metrics.exists():
        lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            aside = _free_name(run_dir.discarded(attempt) / run_dir.metrics.name)
            # Written before they go: a kill between leaves them twice.
            atomic.write_file(aside, b"".join(line for line in lines if _step_of(line) > step))
            atomic.write_file(run_dir.metrics, b"".join(kept))
            moved.append(aside)
    return moved


def set_aside(run_dir: RunDir, path: Path, attempt: int) -> Path:
    """Move `path` to `discarded/attempt_K` on its own filesystem; return the new path."""
    aside = _free_name(run_dir.discarded(attempt) / path.relative_to(run_dir.path))
    try:
        os.rename(path, aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        aside = _free_name(run_dir.discarded_elsewhere(path, attempt))
        os.rename(path, aside)
    return aside


def _free_name(wanted: Path) -> Path:
    """Return `wanted` or a name like it, as an attempt that died at this point may have used it."""
    aside = wanted
    atomic.make_directory(wanted.parent)
    copies = 1
    while aside.exists():
        copies += 1
        aside = wanted.with_name(f"{wanted.name}.{copies}")
    return aside


def _step_of(line: bytes) -> float:
    """Return the step of a line of metrics.jsonl; infinity for a torn line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def clear_unpublished(run_dir: RunDir) -> None:
    """Remove the batch that a dead orchestrator was publishing."""
    # Only after the last batch: the trainer removes older ones under such names at this moment.
    last = max([*run_dir.published_batches(), *run_dir.committed_steps()], default=0)
    prefix = f"{atomic.TEMPORARY_PREFIX}step_"
    for path in run_dir.rollouts.glob(f"{prefix}*"):
        if int(path.name.removeprefix(prefix).split("-")[0]) > last:
            shutil.rmtree(path)


def last_kept_batch(
    attempt: Attempt,
    ckpt: CkptConfig,
    trainer: TrainingCommand,
    orchestrator: OrchestratorConfig | None,
    inference: InferenceConfig | None,
) -> int | None:
    """Return the last journaled batch that this attempt would make itself, bit for bit; None if unknown.

    A batch depends on the settings of orchestrator and engine, on the weights that sample it and, through the
    orchestrator's state, on all batches before. The journal holds from the resumed step while its batches are
    contiguous and whole, if these settings have not changed since the last attempt. If only the trainer's settings
    changed, batches of versions up to the resumed step hold; later weights come out differently now.

    A trainer that is started by hand does not know the orchestrator's settings, and keeps the batches.

    A user who asks for an older step by number wants to do later ones again: then no batch is kept."""
    run_dir, step = attempt.run_dir, attempt.resume_step or 0
    if attempt.fork is not None or not isinstance(trainer, TrainerConfig):
        return None
    steps = run_dir.steps_there()
    if ckpt.resume_step not in ("latest", "auto", -1) and steps and steps[-1] > step:
        return None
    sections = {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}
    names = [name for name, section in sections.items() if section is not None]
    previous = last_started(run_dir, attempt.number, names)
    if previous is None and orchestrator is not None:
        return None
    try:
        if orchestrator is not None and previous is not None:
            before = read_toml(OrchestratorConfig, previous / "orchestrator.toml")
            if not makes_same_batches(before, orchestrator):
                return None
        if inference is not None and previous is not None:
            before = read_toml(InferenceConfig, previous / "inference.toml")
            if not makes_same_batches(before, inference):
                return None
        before = read_toml(TrainerConfig, previous / "trainer.toml") if previous is not None else trainer
        same_weights = fingerprint(before) == fingerprint(trainer)
    except ConfigError:  # of another version
        return None
    if attempt.resume_step is None and _warm_start(before) != _warm_start(trainer):
        return None
    return _last_whole_batch(run_dir, step, _vocab_size(trainer), last_version=None if same_weights else step)


def _last_whole_batch(run_dir: RunDir, step: int, vocab_size: int | None, *, last_version: int | None) -> int:
    """Return the last whole batch from `step` on without a gap, of `last_version` or before."""
    last = step
    while run_dir.batch(last + 1).exists():
        try:
            batch = read_batch(run_dir, last + 1)
        except CheckpointError as error:
            print(f"WARNING: batch {last + 1} is made again: {error}")
            break
        if (problem := fault_of_batch(batch, vocab_size)) is not None:
            print(f"WARNING: batch {last + 1} is made again, because no engine can have sampled it: {problem}")
            break
        if last_version is not None and batch.policy_version > last_version:
            break
        last += 1
    return last


def _vocab_size(config: TrainingCommand) -> int | None:
    """Return how many token ids the model has; None if no local file tells."""
    try:
        return vocab_size_in(Path(config.model.name) / "config.json")
    except DataError:
        return None


def _warm_start(config: TrainingCommand) -> Path | None:
    """Return the weights of a fresh start, if not the model's."""
    path = config.ckpt.init_from if config.ckpt else None
    return path and path.resolve()


def refuse_to_leave_behind(attempt: Attempt, last_batch: int | None, *, clean: bool) -> None:
    """Refuse to set batches of a living orchestrator aside: it would never make them again."""
    run_dir, step = attempt.run_dir, attempt.resume_step or 0
    kept = step if last_batch is None else last_batch
    superseded = [batch for batch in run_dir.published_batches() if batch > kept]
    if superseded or attempt.fork is not None or (clean and run_dir.holds_run()):
        raise RunDirError(
            f"an orchestrator runs in {run_dir.path} and continues after the batches that it has made, but this start "
            f"supersedes {f'batch {superseded[0]} and what follows' if superseded else 'what is there'}. Stop it, then "
            "start the trainer and after it the orchestrator, with the same step."
        )
