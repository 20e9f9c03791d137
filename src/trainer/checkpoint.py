"""Checkpoints of the trainer: sharded save and load, committed by one manifest.

    checkpoints/step_N/trainer/        torch.distributed.checkpoint, progress.json, random_rank_R.json
    checkpoints/step_N/orchestrator/   the orchestrator's state after batch N (RL runs)
    checkpoints/step_N/manifest.json   sizes and checksums of all of it, written last: the commit

Everything is written under a temporary name and renamed when it is whole, so a step exists
completely or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.parallel import Parallel
from trainer.state import Progress, RandomState, TrainState, capture_random_state, restore_random_state, seed_everything
from triad import durable, manifest
from triad.checkpoints import ORCHESTRATOR_DIR, TRAINER_DIR
from triad.config import CkptConfig
from triad.errors import CheckpointError
from triad.journal import STATE_NAME
from triad.run_dir import RunDir

_PROGRESS_NAME = "progress.json"


class _CountingWriter(FileSystemWriter):
    """A FileSystemWriter that notices items that a writer thread lost: torch reports those saves as good."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        written = len(future.value())
        if written != len(plan.items):
            raise OSError(f"{len(plan.items) - written} of {len(plan.items)} tensors were not written to {self.path}")
        return future


class Checkpointer:
    """Saves and loads the `TrainState` of a run."""

    def __init__(
        self, run_dir: RunDir, config: CkptConfig | None, parallel: Parallel, *, seed: int, fingerprint: str
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._parallel = parallel
        self._seed = seed
        self._fingerprint = fingerprint

    def is_due(self, step: int, max_steps: int) -> bool:
        """Whether the configuration asks for a checkpoint after `step`."""
        if self._config is None:
            return False
        return step == max_steps or (self._config.interval is not None and step % self._config.interval == 0)

    def save(self, state: TrainState, *, orchestrator_state: Path | None = None) -> Path:
        """Save and commit the step that `state` is at; return its directory. Collective.

        Args:
            orchestrator_state: file with the orchestrator's state after this step's batch.
        """
        step = state.progress.step
        final = self._run_dir.checkpoint(step)
        temporary = final.with_name(f"{durable.TEMPORARY_PREFIX}{final.name}")
        if self._parallel.is_main:
            durable.make_directory(final.parent)
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / TRAINER_DIR).mkdir(parents=True)
        self._parallel.barrier()
        directory = temporary / TRAINER_DIR
        _save_tensors(state.tensors(), directory)
        random_state = msgspec.json.encode(capture_random_state())
        (directory / f"random_rank_{self._parallel.rank}.json").write_bytes(random_state)
        self._parallel.barrier()
        if self._parallel.is_main:
            (directory / _PROGRESS_NAME).write_bytes(msgspec.json.encode(state.progress))
            if orchestrator_state is not None:
                (temporary / ORCHESTRATOR_DIR).mkdir()
                _link_or_copy(orchestrator_state, temporary / ORCHESTRATOR_DIR / STATE_NAME)
            self._commit(temporary, final, step)
        self._parallel.barrier()
        return final

    def _commit(self, temporary: Path, final: Path, step: int) -> None:
        """Write the manifest last, publish the directory, and only then delete what is too old."""
        listing = manifest.Manifest(
            kind="checkpoint",
            step=step,
            policy_version=step,
            files=manifest.describe_files(temporary),
            world_size=self._parallel.world_size,
            run_id=self._run_dir.run_id(),
            fingerprints=manifest.Fingerprints(config=self._fingerprint),
            libraries=manifest.library_versions(),
        )
        durable.fsync_tree(temporary)
        manifest.write_manifest(temporary, listing)
        durable.publish_directory(temporary, final)
        for old in self._superseded():
            durable.remove_directory(self._run_dir.checkpoint(old))

    def _superseded(self) -> Sequence[int]:
        keep = self._config.keep if self._config else None
        return self._run_dir.committed_steps()[:-keep] if keep else ()

    def load(self, state: TrainState, step: int) -> None:
        """Restore `state` from the committed checkpoint of `step`, verified before a byte is used. Collective.

        Raises:
            CheckpointError: it is damaged, or holds another model or no optimizer.
        """
        directory = self._run_dir.checkpoint(step)
        manifest.verify(directory)
        _load_tensors(state.tensors(), directory / TRAINER_DIR)
        restored = msgspec.json.decode((directory / TRAINER_DIR / _PROGRESS_NAME).read_bytes(), type=Progress)
        for field in Progress.__struct_fields__:
            setattr(state.progress, field, getattr(restored, field))
        self._restore_random(directory / TRAINER_DIR, step)

    def _restore_random(self, directory: Path, step: int) -> None:
        """Restore the generators last; a rank that the checkpoint does not know derives its own."""
        saved_by = len(list(directory.glob("random_rank_*.json")))
        if saved_by == self._parallel.world_size:
            data = (directory / f"random_rank_{self._parallel.rank}.json").read_bytes()
            restore_random_state(msgspec.json.decode(data, type=RandomState))
        else:
            seed_everything(self._seed, step=step, rank=self._parallel.rank)


def _save_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    writer = _CountingWriter(directory, single_file_per_rank=True, sync_files=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # a BaseException: `except Exception` would miss it
        raise CheckpointError(f"saving to {directory} failed: {_reasons(error)}") from error


def _load_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    reader = FileSystemReader(directory)
    _check_same_tensors(tensors, reader.read_metadata().state_dict_metadata, directory)
    try:
        with torch.no_grad():
            dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"loading {directory} failed: {_reasons(error)}") from error


def _check_same_tensors(tensors: dict[str, Tensor], saved: dict[str, Any], directory: Path) -> None:
    """Refuse a checkpoint of another model: torch itself ignores surplus tensors and casts dtypes silently."""
    missing, surplus = sorted(tensors.keys() - saved.keys()), sorted(saved.keys() - tensors.keys())
    if missing or surplus:
        raise CheckpointError(
            f"{directory} does not fit this model: it lacks {_some(missing)} and has besides {_some(surplus)}"
        )
    for name, tensor in tensors.items():
        entry = saved[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{directory}: {name} is not a tensor there")
        if entry.size != tensor.shape or entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{directory} does not fit this model: {name} is {tuple(entry.size)} {entry.properties.dtype} there, "
                f"{tuple(tensor.shape)} {tensor.dtype} here"
            )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "nothing"


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without links
        shutil.copyfile(source, target)
