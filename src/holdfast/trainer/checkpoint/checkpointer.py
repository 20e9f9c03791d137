"""Checkpoints that are committed or absent: for our programs and for your own training loops.

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}
    with Checkpointer("checkpoints", state) as checkpointer:
        step = checkpointer.load("auto")
        while step < max_steps:
            ...
            step += 1
            checkpointer.save(step)

A step is one directory with a manifest of checksums, written last:

    step_N/trainer/        torch.distributed.checkpoint, progress.json, random_rank_R.json
    step_N/manifest.json   sizes and checksums of all of it: the commit

The directory has a temporary name until it is whole, and is then renamed. A step exists completely or not at all.
`save` returns when the state is copied to CPU memory; the rest happens in the background. Optimizers update in place,
so the background must write a copy. Every save reuses the buffers: allocating gigabytes costs more than copying them.
"""

import logging
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointError, RankLost, SaveError
from holdfast.run import checkpoints, manifest
from holdfast.run.manifest import Verification
from holdfast.trainer.checkpoint.commit import Attachment, Commit, Identity, Snapshot, Storage, read_values
from holdfast.trainer.checkpoint.dcp import IndexReader, check_same_tensors, read_tensors, some
from holdfast.trainer.checkpoint.state import (
    ObjectsState,
    RandomState,
    State,
    as_state,
    keeping_random_state,
    restore_random_state,
    seed_everything,
)
from holdfast.trainer.mesh import RankGroup, describe, rank_and_world_size

_log = logging.getLogger("trainer")

_SMALL_ELEMENTS = 1 << 15  # torch itself copies fewer on one thread


class Stager:
    """Copies this rank's shards into buffers, which the next copy overwrites."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of `tensors` on the CPU, valid until the next call.

        DTensors stay DTensors of the same mesh and placements, over the copied shard."""
        staged = {}
        copies_from_gpu = False
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            buffer = self._buffer(name, local)
            _copy(buffer, local)
            copies_from_gpu |= local.is_cuda
            staged[name] = _like(tensor, buffer)
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        if copies_from_gpu:
            # The copies above are only queued.
            torch.cuda.current_stream().synchronize()
        return staged

    @torch.no_grad()
    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the buffers for `tensors` and touch every page, so that the first copy is as fast as later copies."""
        for name, tensor in tensors.items():
            self._buffer(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            # Copies from a GPU to pinned memory do not block this thread.
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer


def _copy(buffer: Tensor, local: Tensor) -> None:
    """Copy on the calling thread only: torch would start a second team of threads on the cores that train."""
    if local.is_cuda or local.numel() < _SMALL_ELEMENTS or not local.is_contiguous():
        buffer.copy_(local, non_blocking=local.is_cuda)
    else:
        # As bytes: numpy has no bfloat16.
        into, of = (one.reshape(-1).view(torch.uint8).numpy() for one in (buffer, local))
        np.copyto(into, of)


def _like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return `shard` with mesh and placements of `tensor`, on the CPU."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor(shard, tensor._spec, requires_grad=False)  # from_local would move it to the mesh's device


class Checkpointer:
    """Saves and loads the state of a training loop. All methods are collective unless they say otherwise.

    With torch.distributed, every rank makes a `Checkpointer` and calls the same methods at the same steps. Only one
    save is written at a time. As a context manager it calls `close` at the end.

    Args:
        directory: the directory that gets one `step_N` per save. All ranks must share its filesystem.
        state: a `State`, or a mapping from names to modules, optimizers, schedulers, other objects with `state_dict`
            and `load_state_dict`, and dicts of plain values.
        save_async: whether `save` returns after copying the state. If False, it returns after the commit.
        on_failure: what the next call does after a failed save: raise its `SaveError` (`stop`), or log it (`warn`).
        retention: which old steps are removed after a commit. Unset: none.
        seed: the seed of a rank's random generators if another number of ranks wrote the checkpoint.
        identity: the manifest's description of the run.
        storage: an object that gets every committed step on rank 0, from the writing thread. Close it after the
            `Checkpointer`. Unset: steps stay in `directory`.
        before_commit: a function that rank 0 calls in the writing thread before each commit. If it raises, the save
            fails.
        may_remove: a function that rank 0 asks in the writing thread before retention removes a step.
        collective_timeout_s: the deadline of each collective of a save. Unset: torch's default.
        updated_by: the optimizers, if only their steps, and code after these steps, change the parameters. On a CPU an
            asynchronous save then copies parameters and optimizer state while the next gradients are computed, and
            the next optimizer step waits for the copy. Buffers are copied at the call.
        check: a function that makes fresh objects, with the names in `state`. The first save is then loaded into
            them and compared. Until the end of the comparison there are two states in memory.
    """

    def __init__(
        self,
        directory: str | Path,
        state: State | Mapping[str, Any],
        *,
        save_async: bool = True,
        on_failure: Literal["stop", "warn"] = "stop",
        retention: checkpoints.Retention | None = None,
        seed: int = 0,
        identity: Identity | None = None,
        storage: Storage | None = None,
        before_commit: Callable[[], None] = lambda: None,
        may_remove: Callable[[int], bool] = lambda _: True,
        collective_timeout_s: float | None = None,
        updated_by: Sequence[torch.optim.Optimizer] = (),
        check: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._state = as_state(state)
        self._save_async = save_async
        self._on_failure = on_failure
        self._seed = seed
        self._run_ids = identity.run_ids if identity else None
        self._control = RankGroup(timeout_s=collective_timeout_s)
        self._stager, self._stager_at_call = Stager(), Stager()
        self._copied_at_call: dict[str, Tensor] = {}
        self._check = check
        # The writing thread has its own group: collectives of two threads in one would mix.
        self._commit = Commit(
            self.directory,
            RankGroup(timeout_s=collective_timeout_s),
            retention or checkpoints.Retention(),
            identity or Identity(),
            storage or Storage(),
            may_remove,
            before_commit,
        )
        self._staged = threading.Event()
        self._staged.set()
        self._hooks = [optimizer.register_step_pre_hook(self._before_update) for optimizer in updated_by]
        self._thread: threading.Thread | None = None
        self._in_flight: int | None = None
        self._results_lock = threading.Lock()
        self._failure: Exception | None = None
        self._newest_failure: Exception | None = None  # of the newest save, for as long as no later one commits
        self._committed: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, Exception):
            self.wait()  # finish the save in progress

    @property
    def num_bytes(self) -> int:
        """The approximate size of a checkpoint in bytes: all tensors of the state, on all ranks."""
        # A DTensor counts the elements of the whole tensor.
        return sum(tensor.numel() * tensor.element_size() for tensor in self._state.tensors().values())

    def reserve(self) -> None:
        """Allocate the buffers of asynchronous saves, so that the first save is as fast as later saves."""
        if self._save_async:
            self._stager.reserve(self._state.tensors())

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        attachments: Mapping[str, Attachment] | None = None,
    ) -> None:
        """Save the state as the checkpoint of `step`, after the end of an earlier save. Raise CheckpointError if `step`
        is not an integer from 0, the state cannot be kept, or `check` found a difference. Raise SaveError if this save
        (synchronous) or an earlier one (asynchronous) failed.

        Args:
            metrics: numbers of this step for the manifest. `Retention.keep_best` reads them.
            attachments: more files by their path in the checkpoint: the content, or a function that returns it.
        """
        step = as_step(step)
        if self._thread is not None and self._thread.is_alive():
            started = time.perf_counter()
            self.wait()
            _log.warning("waited %.1f s for the save before step %d", time.perf_counter() - started, step)
        self._collect_result()
        written = attachments if self._control.is_main else None
        # Before the thread starts: training changes counters and generators from then on.
        snapshot = Snapshot.of(self._state, step, metrics=metrics, attachments=written)
        tensors = self._state.tensors()
        if self._save_async:
            if self._hooks and not any(tensor.is_cuda for tensor in tensors.values()):
                # Not in the thread: the next optimizer step may come before the thread runs.
                self._staged.clear()
                names = self._state.volatile() if isinstance(self._state, ObjectsState) else set[str]()
                self._copied_at_call = {}
                if names:
                    self._copied_at_call = self._stager_at_call.stage({name: tensors[name] for name in names})
            else:
                tensors = self._stager.stage(tensors)
            # A daemon: a save that hangs in a collective must not keep a failed process alive.
            self._thread = threading.Thread(
                target=self._write,
                args=(lambda: self._commit.write(snapshot, tensors, stage=self._stage), step),
                daemon=True,
            )
            self._in_flight = step
            self._thread.start()
        else:
            self._write(lambda: self._commit.write(snapshot, tensors), step)
            self._collect_result()
        if self._check is not None:
            self.wait()
            self._collect_result()
            fresh, self._check = self._check, None
            with keeping_random_state():
                _check_comes_back(self.directory / f"step_{step}", self._state, fresh())

    def _stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy the tensors, unless `save` has copied them; training may change them afterwards."""
        if self._staged.is_set():
            return tensors
        copied = self._copied_at_call
        try:
            return copied | self._stager.stage({name: one for name, one in tensors.items() if name not in copied})
        finally:
            self._staged.set()

    def _before_update(self, *_: object) -> None:
        self._staged.wait()

    def _write(self, action: Callable[[], None], step: int) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised by the next call
            if isinstance(error, Exception):
                failure = error
            else:  # such as torch's CheckpointException
                failure = SaveError(f"the checkpoint of step {step} could not be saved: {describe(error)}")
                failure.__cause__ = error
            with self._results_lock:
                self._failure = self._newest_failure = failure
        else:
            with self._results_lock:
                self._newest_failure = None
                self._committed.append(step)
        finally:
            self._staged.set()  # also if staging was never reached: the optimizer step waits

    def poll(self) -> list[int]:
        """Return the steps committed since the last call. Not collective. Raise SaveError if a save failed since the
        last call, and `on_failure` is `stop`."""
        self._collect_result()
        with self._results_lock:
            committed, self._committed = self._committed, []
        return committed

    def _collect_result(self) -> None:
        """Raise or log the failure of a save that has ended; `poll` returns the committed steps."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._in_flight = None
        with self._results_lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            # Without the lost rank no later save can succeed.
            if self._on_failure == "stop" or isinstance(failure, RankLost):
                raise failure
            _log.error("%s", failure)

    @property
    def in_flight(self) -> int | None:
        """The step that was being written at the last `save` or `poll`; None if none was."""
        return self._in_flight

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is being written. Return False if that takes longer than `timeout_s`. Not collective."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Wait for the last save and leave the process groups. Raise SaveError if the last save failed, even with
        `on_failure = "warn"`."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        try:
            self._collect_result()
        finally:
            self._commit.close()
            self._control.close()
        if self._newest_failure is not None:
            raise self._newest_failure

    def load(self, step: int | Literal["latest", "auto"] = "latest", *, verify: Verification = "full") -> int:
        """Restore the state from a checkpoint, and return the checkpoint's step. Raise CheckpointError if the
        checkpoint is missing or damaged, has no optimizer, or does not fit the state.

        Args:
            step: a number, or `latest` for the newest intact checkpoint (damaged checkpoints are skipped with a
                warning). `auto` is the same, but without any checkpoint it returns 0 and leaves the state.
            verify: what is checked before loading: every byte (`full`), or only sizes (`size`).
        """
        self.wait()
        found = self._control.on_main(lambda: self._choose(step, verify), error=CheckpointError)
        chosen = self._control.broadcast(found)
        if chosen is None:
            return 0
        load_state_with_optimizer(self.directory / f"step_{chosen}", self._state, seed=self._seed, verify="size")
        self._commit.protect(chosen)
        return chosen

    def _choose(self, step: int | Literal["latest", "auto"], verify: Verification) -> int | None:
        if step not in ("latest", "auto"):
            step = as_step(step)
            checkpoints.verify_checkpoint(self.directory / f"step_{step}", how=verify, step=step, to_resume=True)
            return step
        entries = [entry for entry in checkpoints.list_entries(self.directory, self._run_ids) if entry.status != "torn"]
        for entry in entries:
            if entry.status == "foreign":
                _log.warning("skipping step %d: %s", entry.step, entry.reason)
        newest, damaged = checkpoints.newest_intact(
            [entry.step for entry in entries if entry.status != "foreign"],
            lambda number: checkpoints.verify_checkpoint(
                self.directory / f"step_{number}", how=verify, step=number, to_resume=True
            ),
            say=_log.warning,
        )
        if newest is not None:
            return newest
        if damaged:
            raise CheckpointError(f"every checkpoint is damaged: {'; '.join(damaged)}")
        if step == "auto":
            return None
        raise CheckpointError(f"there is no checkpoint in {self.directory}; use `auto` to start from scratch")


def as_step(step: Any) -> int:
    """Return the number of a step. Raise CheckpointError if it is not an integer from 0."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(f"a step must be an integer from 0, got {step!r} ({type(step).__name__})")
    return number


def _check_comes_back(path: Path, state: State, fresh: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint, loaded into fresh objects, is not the state that was saved."""
    loaded = as_state(fresh)
    load_state_with_optimizer(path, loaded, verify="size")
    here, there = state.tensors(), loaded.tensors()
    differing = sorted(here.keys() ^ there.keys())
    differing += [name for name in here if name in there and not _same_bits(here[name], there[name])]
    values, others = state.values(), loaded.values()
    differing += [name for name in values if values[name] != others.get(name)]
    if differing:
        raise CheckpointError(
            f"{path} does not bring everything back: loaded into fresh objects, {some(differing)} "
            f"{'is' if len(differing) == 1 else 'are'} not as saved"
        )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    one, other = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (first, second))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def save_state(directory: str | Path, state: State | Mapping[str, Any], *, step: int = 0) -> None:
    """Save tensors, optimizer, values and random generators into `directory`. Collective. Raise SaveError if a rank
    failed. Every rank raises it, with that rank's reason. `directory`: a path that does not exist. The files are
    written under a temporary name, which is then renamed."""
    ranks = RankGroup()
    whole = as_state(state)
    try:
        Commit(Path(directory).absolute().parent, ranks, checkpoints.Retention(), Identity(), Storage()).write(
            Snapshot.of(whole, step), whole.tensors(), name=Path(directory).name
        )
    finally:
        ranks.close()


def load_state_with_optimizer(
    directory: str | Path, state: State | Mapping[str, Any], *, seed: int = 0, verify: Verification = "full"
) -> int:
    """Restore everything that `save_state` saved, and return its step. Collective. Raise CheckpointError if the
    directory is damaged, has only weights, or does not fit the state."""
    path = Path(directory)
    if checkpoints.kind_of(path) is not checkpoints.Kind.CHECKPOINT:
        raise CheckpointError(
            f"{path} holds {checkpoints.describe_found(path)}; only committed checkpoints have optimizer and counters. "
            "To take the weights alone, use load_weights_only (--ckpt.init-from)."
        )
    listing = checkpoints.verify_checkpoint(path, how=verify, to_resume=True)
    whole = as_state(state)
    index = IndexReader(path / checkpoints.TRAINER_DIR)
    saved = index.only_tensors()
    values = read_values(path / checkpoints.TRAINER_DIR)
    if isinstance(whole, ObjectsState):
        whole.check(values)  # before an optimizer makes its state in a step
    tensors = whole.targets(saved) if isinstance(whole, ObjectsState) else whole.tensors()
    check_same_tensors(tensors, saved, path)
    whole.restore(values)  # before a tensor is touched: it may refuse
    read_tensors(tensors, index)
    if isinstance(whole, ObjectsState):
        whole.finish()
    _restore_random(path / checkpoints.TRAINER_DIR, listing, seed)  # last: loading may draw numbers
    return listing.step


def _restore_random(directory: Path, listing: manifest.Manifest, seed: int) -> None:
    """Restore this rank's generators; derive them from seed, step and rank if another number of ranks saved."""
    rank, world_size = rank_and_world_size()
    if listing.world_size == world_size:
        data = (directory / f"random_rank_{rank}.json").read_bytes()
        restore_random_state(msgspec.json.decode(data, type=RandomState))
    else:
        seed_everything(seed, step=listing.step, rank=rank)
