"""Which step `ckpt.resume_step` means: by number, or the newest intact one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from holdfast.shared.errors import CheckpointError, ReadError
from holdfast.shared.files.checkpoints import newest_intact, verify_checkpoint
from holdfast.shared.files.manifest import Verification
from holdfast.shared.files.run_dir import RunDir


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
            verify_checkpoint(run_dir.checkpoint(step), how=how, step=step)
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
        raise CheckpointError(f"ckpt.resume_step = {wanted}: every checkpoint is damaged: {'; '.join(damaged)}")
    if wanted == "auto":
        return None
    raise CheckpointError(
        f"ckpt.resume_step = {wanted}: nothing to resume in {run_dir.checkpoints}: {_listing(steps)}. "
        "Use `auto` to start afresh when there is none."
    )


def _checked(run_dir: RunDir, wanted: int, steps: list[int], *, is_there: bool, how: Verification) -> int:
    """Return a step that was asked for by number, when it is there and intact."""
    if not is_there:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted} is not in {run_dir.checkpoints}: {_listing(steps)}.{_nothing_there(steps)}"
        )
    try:
        verify_checkpoint(run_dir.checkpoint(wanted), how=how, step=wanted)
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
    return "" if steps else " Leave --ckpt.resume-step out to start afresh, or correct --output-dir."
