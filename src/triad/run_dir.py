"""The run directory: every path of a run, and which process may touch it.

run.json                 run id and creation time
run.lock                 held by the launcher while the run is going
configs/attempt_K/       the resolved TOML of every process
checkpoints/step_N/      trainer/, orchestrator/, manifest.json (written last: the commit)
rollouts/step_N/         the batch that step N trains on, and the orchestrator's state after it
rollouts/generations_N.log  finished generations of batch N while it is being made
weights/step_N/          what inference serves (Hugging Face layout)
metrics.jsonl            one JSON object per step
logs/attempt_K/          one log per process, and events.jsonl (phases)
discarded/attempt_K/     what a resume from an older step superseded
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from triad import durable, manifest
from triad.errors import CheckpointError, RunDirError

_STEP = re.compile(r"step_(\d+)$")
_OF_STEP = re.compile(r"(step_\d+|generations_\d+\.log)$")
_ATTEMPT = re.compile(r"attempt_(\d+)$")


def _number_of(path: Path) -> int:
    return int(path.stem.rsplit("_", 1)[1])


def _numbered_paths(parent: Path) -> list[Path]:
    """Every step directory and generation log in `parent`, in the order of steps."""
    if not parent.is_dir():
        return []
    return sorted((path for path in parent.iterdir() if _OF_STEP.match(path.name)), key=_number_of)


def _numbered(parent: Path, pattern: re.Pattern[str]) -> list[int]:
    if not parent.is_dir():
        return []
    matches = (pattern.match(path.name) for path in parent.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


class RunDir:
    """Paths of one run. Creating the object touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.checkpoints = self.path / "checkpoints"
        self.rollouts = self.path / "rollouts"
        self.weights = self.path / "weights"
        self.metrics = self.path / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step`."""
        return self.checkpoints / f"step_{step}"

    def batch(self, step: int) -> Path:
        """Directory of the batch that `step` trains on."""
        return self.rollouts / f"step_{step}"

    def generations(self, step: int) -> Path:
        """Log of the finished generations of the batch of `step`, while it is being made."""
        return self.rollouts / f"generations_{step}.log"

    def weights_of(self, version: int) -> Path:
        """Directory of the published weights of policy `version`."""
        return self.weights / f"step_{version}"

    def configs(self, attempt: int) -> Path:
        """Directory of the resolved configuration of one attempt."""
        return self.path / "configs" / f"attempt_{attempt}"

    def logs(self, attempt: int) -> Path:
        """Directory of the logs of one attempt."""
        return self.path / "logs" / f"attempt_{attempt}"

    def discarded(self, attempt: int) -> Path:
        """Where attempt `attempt` put what it superseded."""
        return self.path / "discarded" / f"attempt_{attempt}"

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "run.json").exists()

    def run_id(self) -> str:
        """The id of the run that this directory holds."""
        return json.loads((self.path / "run.json").read_text())["run_id"]

    def committed_steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        return [step for step in _numbered(self.checkpoints, _STEP) if manifest.is_committed(self.checkpoint(step))]

    def saved_steps(self) -> list[int]:
        """Steps with a checkpoint that was committed once, ascending; it may have been damaged since."""
        steps = _numbered(self.checkpoints, _STEP)
        return [step for step in steps if (self.checkpoint(step) / manifest.MANIFEST_NAME).exists()]

    def published_batches(self) -> list[int]:
        """Steps whose batch is published, ascending."""
        return _numbered(self.rollouts, _STEP)

    def published_weights(self) -> list[int]:
        """Policy versions whose weights are published, ascending."""
        return _numbered(self.weights, _STEP)

    def next_attempt(self) -> int:
        """The number of the attempt that starts now, from 1."""
        return max(_numbered(self.path / "configs", _ATTEMPT), default=0) + 1

    def lock(self) -> None:
        """Take the directory for this process; the kernel frees it when the process ends.

        Raises:
            RunDirError: another process holds it, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirError(
                f"{self.path} cannot be a run directory: {error}. Choose another with --output-dir."
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode().strip() or "unknown"
            os.close(descriptor)
            raise RunDirError(
                f"{self.path} is in use by another run (process {holder}). Wait for it, stop it, "
                "or choose another directory with --output-dir."
            ) from None
        # Never closed: the lock lasts as long as the process, whatever becomes of this object.
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())

    def create(self) -> None:
        """Mark the directory as holding a run."""
        identity = {"run_id": uuid.uuid4().hex, "created_unix_s": int(time.time())}
        durable.write_file(self.path / "run.json", json.dumps(identity, indent=1).encode())

    def remove_run(self) -> None:
        """Remove everything that a run made here; other files stay."""
        for name in ("run.json", "checkpoints", "rollouts", "weights", "metrics.jsonl", "configs", "logs", "discarded"):
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def prune_batches(self, step: int) -> None:
        """Remove the batches up to and including `step`, which no checkpoint needs any more."""
        for old in self.published_batches():
            if old <= step:
                durable.remove_directory(self.batch(old))

    def clear_leftovers(self) -> list[Path]:
        """Remove what interrupted writers left: temporary names, and checkpoints never committed."""
        removed = []
        for parent in (self.path, self.checkpoints, self.rollouts, self.weights):
            removed += durable.clear_leftovers(parent)
        for step in _numbered(self.checkpoints, _STEP):
            if not (self.checkpoint(step) / manifest.MANIFEST_NAME).exists():
                shutil.rmtree(self.checkpoint(step))
                removed.append(self.checkpoint(step))
        return removed

    def set_aside_after(self, step: int, attempt: int, *, keep_journal: bool = False) -> list[Path]:
        """Move what lies after `step` to `discarded/attempt_K`, and return what was moved.

        That is checkpoints, weights and batches of later steps, and their lines of metrics.jsonl.
        Nothing is deleted but the weights of `step` itself, which the trainer publishes again from
        the checkpoint, so that nobody takes old ones for them.

        Args:
            keep_journal: leave batches in place, to be trained again instead of being made again.
        """
        target = self.discarded(attempt)
        later = [
            path
            for parent in (self.checkpoints, self.weights, self.rollouts)
            for path in _numbered_paths(parent)
            if _number_of(path) > step and not (keep_journal and parent == self.rollouts)
        ]
        moved = []
        for path in later:
            destination = target / path.relative_to(self.path)
            destination.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, destination)
            moved.append(destination)
        if self.weights_of(step).exists():
            durable.remove_directory(self.weights_of(step))
        if self.metrics.exists():
            lines = self.metrics.read_text().splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            if len(kept) < len(lines):
                target.mkdir(parents=True, exist_ok=True)
                (target / "metrics.jsonl").write_text("".join(line for line in lines if _step_of(line) > step))
                durable.write_file(self.metrics, "".join(kept).encode())
                moved.append(target / "metrics.jsonl")
        return moved


def _step_of(line: str) -> float:
    """Step of one line of metrics.jsonl; a torn line counts as the last of all."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


def resolve_resume_step(
    run_dir: RunDir, wanted: int | Literal["latest", "auto"] | None, *, say: Callable[[str], None] = print
) -> int | None:
    """Return the step to resume from, or None for a fresh start. The step is verified, every byte of it.

    Args:
        run_dir: where the checkpoints are.
        wanted: `ckpt.resume_step`: a step, `latest` or -1, `auto`, or None. `latest` and `auto` fall
            back past damaged steps; a step asked for by number does not.
        say: is told which steps were skipped and why.

    Raises:
        CheckpointError: the step is not there or damaged, listing the steps that are.
    """
    if wanted is None:
        return None
    steps = run_dir.saved_steps()
    there = f"committed steps: {', '.join(map(str, steps))}" if steps else "it has no committed checkpoint"
    if wanted not in ("latest", "auto", -1):
        if wanted not in steps:
            raise CheckpointError(f"ckpt.resume_step = {wanted} is not in {run_dir.checkpoints}: {there}.")
        try:
            manifest.verify(run_dir.checkpoint(int(wanted)))
        except CheckpointError as error:
            raise CheckpointError(f"ckpt.resume_step = {wanted}: {error}. Choose another step; {there}.") from None
        return int(wanted)
    damaged = []
    for step in reversed(steps):
        try:
            manifest.verify(run_dir.checkpoint(step))
            return step
        except CheckpointError as error:
            say(f"WARNING: skipping the checkpoint of step {step}: {error}")
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"ckpt.resume_step = {wanted}: every checkpoint is damaged: {'; '.join(damaged)}")
    if wanted == "auto":
        return None
    raise CheckpointError(
        f"ckpt.resume_step = {wanted}: nothing to resume in {run_dir.checkpoints}: {there}. "
        "Use `auto` to start afresh when there is none."
    )
