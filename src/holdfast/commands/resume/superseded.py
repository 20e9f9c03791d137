"""What a start moves out of its way, to `discarded/attempt_K`: later steps than its own, and damaged checkpoints.

And what it removes: batches that were never published.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from holdfast.shared.files import durable
from holdfast.shared.files.run_dir import RunDir, number_of, numbered_paths


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
        durable.remove_directory(run_dir.weights_of(step))
    if run_dir.metrics.exists():
        lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            aside = _free_name(run_dir, run_dir.metrics, attempt)
            # Put aside before they go: a kill between leaves them twice, not nowhere.
            durable.write_file(aside, b"".join(line for line in lines if _step_of(line) > step))
            durable.write_file(run_dir.metrics, b"".join(kept))
            moved.append(aside)
    return moved


def set_aside(run_dir: RunDir, path: Path, attempt: int) -> Path:
    """Move `path` to `discarded/attempt_K`; return where it is now."""
    aside = _free_name(run_dir, path, attempt)
    os.rename(path, aside)
    return aside


def _free_name(run_dir: RunDir, path: Path, attempt: int) -> Path:
    """Where to put `path`: an attempt that died while it set things aside has put others there already."""
    aside = wanted = run_dir.discarded(attempt) / path.relative_to(run_dir.path)
    durable.make_directory(wanted.parent)
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
    prefix = f"{durable.TEMPORARY_PREFIX}step_"
    for path in run_dir.rollouts.glob(f"{prefix}*"):
        if int(path.name.removeprefix(prefix).split("-")[0]) > last:
            shutil.rmtree(path)
