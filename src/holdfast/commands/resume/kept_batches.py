"""Which journaled batches an attempt trains again instead of making them again."""

from __future__ import annotations

from pathlib import Path

from holdfast.commands.resume.attempt import Attempt, last_started
from holdfast.shared.config.base import CkptConfig
from holdfast.shared.config.fingerprint import fingerprint, makes_same_batches
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.load import read_toml
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.errors import CheckpointError, ConfigError, DataError, RunDirError
from holdfast.shared.files.journal import read_batch
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.sampled_checks import problem_of_batch, vocab_size_in


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
