"""Forking: starting a run from the checkpoint of another one, which stays as it is."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import CheckpointError, ConfigError, RunDirError
from holdfast.run import atomic
from holdfast.run.checkpoints import Kind, describe_found, kind_of, list_entries, verify_checkpoint
from holdfast.run.manifest import MANIFEST_NAME, Manifest, Verification, read_manifest, verify
from holdfast.run.run_dir import RunDir

_OTHER_FLAG = {
    Kind.DCP: "--ckpt.weights-only {} takes its weights and nothing else.",
    Kind.WEIGHTS: "--ckpt.weights-only {0} or --model.name {0} starts a run from its weights.",
    Kind.HUGGING_FACE: "--ckpt.weights-only {0} or --model.name {0} starts a run from its weights.",
    Kind.ADAPTER: "--ckpt.weights-only {} starts a run with model.lora from it.",
    Kind.TENSORS: "--ckpt.weights-only {} starts a run from its weights.",
}


@dataclass(frozen=True)
class Fork:
    """A verified checkpoint of another run to start from.

    Attributes:
        directory: OTHER/checkpoints/step_N.
        listing: its manifest.
        weights: published weights of OTHER, of versions just before the step, that batches may need.
        created_unix_s: when OTHER was first started, whose date chat templates write; None if that is not known.
    """

    directory: Path
    listing: Manifest
    weights: list[Path]
    created_unix_s: int | None

    @property
    def origin(self) -> dict[str, str | int]:
        """What run.json says of it."""
        return {"run_id": self.listing.run_id, "step": self.listing.step, "path": str(self.directory)}


def find_fork(path: Path, run_dir: RunDir, *, how: Verification, async_level: int = 0) -> Fork:
    """Return the checkpoint at `path`, verified.

    Args:
        run_dir: the run that is to start from it.
        how: see `manifest.verify`.
        async_level: how many versions before the step an RL run needs.

    Raises:
        CheckpointError: it is damaged, or no checkpoint: says what it is and which flag fits.
        ConfigError: it is of this run itself.
    """
    # Resolved: a link into the run's own directory is one as well.
    directory = path.resolve()
    if directory.is_relative_to(run_dir.path.resolve()):
        raise ConfigError(
            f"ckpt.resume_dir = {path} lies in the run's own directory {run_dir.path}. Go on from it with "
            "--ckpt.resume-step N, or fork it into another directory with --output-dir."
        )
    _refuse_other_kinds(path)
    entry = next((entry for entry in list_entries(directory.parent) if entry.path == directory), None)
    try:
        listing = verify_checkpoint(directory, how=how, step=entry.step if entry else None)
    except CheckpointError as error:
        raise CheckpointError(
            f"ckpt.resume_dir = {path}: {error}. {_others(directory)}A damaged checkpoint cannot be forked."
        ) from None
    weights, created = [], None
    if directory.parent.name == "checkpoints":
        other = RunDir(directory.parent.parent)
        with suppress(RunDirError, OSError):  # the fork needs nothing else of it
            created = other.created_unix_s()
        versions = range(max(0, listing.step - async_level), listing.step)
        for version in versions:
            if other.weights_of(version).is_dir():
                weights.append(other.weights_of(version))
            else:
                print(
                    f"{other.weights_of(version)} is no longer there: other weights sample the batch that it would have"
                )
    return Fork(directory, listing, weights, created)


def _refuse_other_kinds(path: Path) -> None:
    kind = kind_of(path)
    if kind is Kind.CHECKPOINT:
        return
    advice = _OTHER_FLAG.get(kind, "").format(path)
    if kind is Kind.DCP and kind_of(path.parent) is Kind.CHECKPOINT:
        advice = f"The checkpoint is the directory that it lies in: --ckpt.resume-dir {path.parent}."
    elif kind is Kind.UNKNOWN:
        advice = "Give the directory of one step, such as OTHER/checkpoints/step_100."
    raise CheckpointError(
        f"ckpt.resume_dir = {path} is {describe_found(path)}. Needed: a checkpoint of a run "
        f"(OTHER/checkpoints/step_N), which holds optimizer, counters and random state besides the weights. {advice}"
    )


def _others(directory: Path) -> str:
    entries = list_entries(directory.parent)
    steps = [str(entry.step) for entry in entries if entry.status == "committed" and entry.path != directory]
    return f"Other committed steps there: {', '.join(steps)}. " if steps else ""


def copy_fork(fork: Fork, run_dir: RunDir, *, how: Verification) -> None:
    """Put the checkpoint, and the older weights that batches need, into `run_dir`.

    Files are hard-linked where the filesystem can do that, else copied: nothing ever writes into
    a committed checkpoint, and removing one of two links leaves the other. Each directory appears
    under its name by one rename, when it is whole.

    Raises:
        CheckpointError: something could not be copied (disk full), or weights of the other run are damaged.
    """
    for weights in fork.weights:
        version = int(weights.name.removeprefix("step_"))
        _bring_directory(weights, run_dir.weights_of(version), verify(weights, how=how, step=version))
    _bring_directory(fork.directory, run_dir.checkpoint(fork.listing.step), fork.listing)


def _bring_directory(source: Path, final: Path, listing: Manifest) -> None:
    temporary = atomic.temporary_sibling(final)
    try:
        atomic.make_directory(final.parent)
        all_linked = True
        for name in (*listing.files, MANIFEST_NAME):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            all_linked &= atomic.link_or_copy(source / name, temporary / name)
        # Links are the bytes that were verified; copies are others.
        verify(temporary, how="size" if all_linked else "full", step=listing.step)
        # It was verified a while ago: its own run may have put another step in its place since.
        if read_manifest(temporary).checksum != listing.checksum:
            raise CheckpointError(f"{source} changed while it was copied to {final}")
        atomic.publish_directory(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{source} could not be copied to {final}: {error.strerror or error}") from error
