"""Resolves `ckpt.resume_step` to a step by number or to the newest intact step, and moves away what it supersedes.

Later steps and damaged checkpoints move to `discarded/attempt_K`; unpublished batches are deleted. The attempt trains
on journaled batches that it can keep, instead of sampling them again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
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
from holdfast.protocol.rollouts import problem_of_batch, vocab_size_in
from holdfast.run import atomic
from holdfast.run.checkpoints import newest_intact, verify_checkpoint
from holdfast.run.journal import read_batch
from holdfast.run.manifest import Verification
from holdfast.run.run_dir import RunDir, number_of, numbered_paths


def resolve_resume_step(
    run_dir: RunDir,
    wanted: int | Literal["latest", "auto"] | None,
    *,
    how: Verification = "full",
    say: Callable[[str], None] = print,
) -> int | None:
    """Return the step to resume from, or None for a fresh start. The step is verified.

    Args:
        run_dir: where the checkpoints are.
        wanted: `ckpt.resume_step`: a step, `latest` or -1, `auto`, or None. `latest` and `auto` fall
            back past damaged steps; a step asked for by number does not.
        how: `full` reads every byte; `size` compares sizes only.
        say: is told which steps were skipped and why.

    Raises:
        CheckpointError: the step is not there or damaged, listing the steps that are.
        ReadError: the step cannot be read. An older one is not taken for it.
    """
    if wanted is None:
        return None
    entries = run_dir.entries()
    steps = [entry.step for entry in entries if entry.status == "committed"]
    if wanted not in ("latest", "auto", -1):
        return _checked(run_dir, int(wanted), steps, is_there=wanted in [entry.step for entry in entries], how=how)

    def check(step: int) -> None:
        try:
            verify_checkpoint(run_dir.checkpoint(step), how=how, step=step, to_resume=True)
        except ReadError as error:
            others = ", ".join(str(other) for other in steps if other < step) or "none"
            raise ReadError(
                f"ckpt.resume_step = {wanted}: {error}. That is no damage, so no older step is taken for step "
                f"{step}. Mend the storage, or choose one by number: {others}."
            ) from error

    # Unreadable and damaged ones, too: they must stop or be named, not be passed over in silence.
    there_are = [entry.step for entry in entries]
    newest, damaged = newest_intact(there_are, check, say=lambda text: say(f"WARNING: {text}"))
    if newest is not None:
        return newest
    if damaged:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted}: every checkpoint is damaged: {'; '.join(damaged)}. `ckpt verify` says more; "
            "put a copy in their place, or choose another directory with --output-dir"
        )
    if wanted == "auto":
        return None
    raise CheckpointError(
        f"ckpt.resume_step = {wanted}: nothing to resume in {run_dir.checkpoints}: {_listing(steps)}. "
        "Use `auto` to start from scratch if there is none."
    )


def _checked(run_dir: RunDir, wanted: int, steps: list[int], *, is_there: bool, how: Verification) -> int:
    """Return a step that was asked for by number, when it is there and intact."""
    if not is_there:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted} is not in {run_dir.checkpoints}: {_listing(steps)}.{_nothing_there(steps)}"
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


def _nothing_there(steps: list[int]) -> str:
    return "" if steps else " Leave --ckpt.resume-step out to start from scratch, or correct --output-dir."


def set_aside_damaged(run_dir: RunDir, attempt: int) -> list[tuple[Path, str]]:
    """Move checkpoints without a valid manifest to `discarded/attempt_K`; return where to, and the reasons.

    A save gets its name when it is whole, so these were committed once and lost something since.
    """
    damaged = [entry for entry in run_dir.entries() if entry.status == "damaged"]
    return [(set_aside(run_dir, entry.path, attempt), entry.reason) for entry in damaged]


def set_aside_after(run_dir: RunDir, step: int, attempt: int, *, last_batch: int | None = None) -> list[Path]:
    """Move what lies after `step` to `discarded/attempt_K`, and return where it is now.

    That is checkpoints, weights, batches and evaluations of later steps, and their lines of metrics.jsonl.
    Nothing is deleted but the weights of `step` itself, which the trainer publishes again from
    the checkpoint, so that nobody takes old ones for them.

    Args:
        last_batch: leave batches up to this one in place, to be trained again instead of being
            made again, and the generations of the one after it; unset: all move.
    """
    until = {
        run_dir.checkpoints: step,
        run_dir.weights: step,
        run_dir.rollouts: step if last_batch is None else last_batch,
        # Of versions that may have made a batch which stays, or the one that is made next.
        run_dir.evaluations: step if last_batch is None else last_batch,
    }
    later = [
        path
        for parent, last in until.items()
        for path in numbered_paths(parent)
        # The log behind the last kept batch is of the one to be made next: its answers still hold.
        if number_of(path) > last + (path.suffix == ".log" and last_batch is not None)
    ]
    moved = [set_aside(run_dir, path, attempt) for path in later]
    if run_dir.weights_of(step).exists():
        atomic.remove_directory(run_dir.weights_of(step))
    if run_dir.metrics.exists():
        lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            aside = _free_name(run_dir.discarded(attempt) / run_dir.metrics.name)
            # Put aside before they go: a kill between leaves them twice, not nowhere.
            atomic.write_file(aside, b"".join(line for line in lines if _step_of(line) > step))
            atomic.write_file(run_dir.metrics, b"".join(kept))
            moved.append(aside)
    return moved


def set_aside(run_dir: RunDir, path: Path, attempt: int) -> Path:
    """Move `path` to `discarded/attempt_K`, on its own filesystem; return where it is now."""
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
    """Return `wanted` or a name like it: an attempt that died at this point has put others there already."""
    aside = wanted
    atomic.make_directory(wanted.parent)
    copies = 1
    # rename would replace a file, or fail on a directory.
    while aside.exists():
        copies += 1
        aside = wanted.with_name(f"{wanted.name}.{copies}")
    return aside


def _step_of(line: bytes) -> float:
    """Step of one line of metrics.jsonl; a torn or damaged line counts as the last of all."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def clear_unpublished(run_dir: RunDir) -> None:
    """Remove what a dead orchestrator left of the batch that it was publishing."""
    # Only behind the last batch: the trainer removes older ones under such names at this moment.
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
    """Return the last journaled batch that this attempt would make itself, bit for bit; None if none can be known.

    A batch depends on the settings of orchestrator and engine, on the weights that sample it and, through the
    orchestrator's state, on all batches before. So the journal holds from the resumed step as far
    as its batches are contiguous and whole, provided that what makes batches has not changed since
    the last attempt. If only the trainer's settings changed, batches that were sampled by versions
    up to the resumed step still hold; those of later versions do not, because these weights come
    out differently now. That damaged checkpoints were skipped changes nothing about it.

    A trainer that is started by hand knows no orchestrator's settings: the one that made the batches makes the next
    ones, too, or whoever started another one did not clear them.

    Who asks for an older step by number while there are later ones wants to do them again (with
    another environment, say, whose code is no setting): then nothing of the journal is kept.
    """
    run_dir, step = attempt.run_dir, attempt.resume_step or 0
    if attempt.fork is not None or not isinstance(trainer, TrainerConfig):
        return None
    steps = run_dir.steps_there()
    if ckpt.resume_step not in ("latest", "auto", -1) and steps and steps[-1] > step:
        return None
    sections = {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}
    names = [name for name, section in sections.items() if section is not None]
    previous = last_started(run_dir, attempt.number, names)
    # What the batches were made with cannot be known.
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
    except ConfigError:  # it was written by another version
        return None
    if attempt.resume_step is None and _warm_start(before) != _warm_start(trainer):
        return None
    # Where the weights come out differently now, so would the batches that later versions made.
    return _last_whole_batch(run_dir, step, _vocab_size(trainer), last_version=None if same_weights else step)


def _last_whole_batch(run_dir: RunDir, step: int, vocab_size: int | None, *, last_version: int | None) -> int:
    """Return the last batch from `step` on that is there without a gap, whole, and of `last_version` or before."""
    last = step
    while run_dir.batch(last + 1).exists():
        try:
            batch = read_batch(run_dir, last + 1)
        except CheckpointError as error:
            print(f"WARNING: batch {last + 1} is made again: {error}")
            break
        if (problem := problem_of_batch(batch, vocab_size)) is not None:
            print(f"WARNING: batch {last + 1} is made again, for nobody can have sampled it: {problem}")
            break
        if last_version is not None and batch.policy_version > last_version:
            break
        last += 1
    return last


def _vocab_size(config: TrainingCommand) -> int | None:
    """Return how many token ids the model has; None where that takes more than a look at a local file."""
    try:
        return vocab_size_in(Path(config.model.name) / "config.json")
    except DataError:
        return None


def _warm_start(config: TrainingCommand) -> Path | None:
    """Return where a fresh start takes its weights from, if not from the model."""
    path = config.ckpt.weights_only if config.ckpt else None
    return path and path.resolve()


def refuse_to_leave_behind(attempt: Attempt, last_batch: int | None, *, clean: bool) -> None:
    """Refuse to set batches aside that a living orchestrator has made: it would never make them again."""
    run_dir, step = attempt.run_dir, attempt.resume_step or 0
    kept = step if last_batch is None else last_batch
    superseded = [batch for batch in run_dir.published_batches() if batch > kept]
    if superseded or attempt.fork is not None or (clean and run_dir.holds_run()):
        raise RunDirError(
            f"an orchestrator runs in {run_dir.path} and goes on behind the batches that it has made, and this start "
            f"supersedes {f'batch {superseded[0]} and what follows' if superseded else 'what is there'}. Stop it, then "
            "start the trainer and after it the orchestrator, with the same step."
        )
