"""The commit protocol of one checkpoint, and the storage of committed checkpoints.

1. Rank 0 makes `.tmp-step_N`; every rank writes and fsyncs its shards and its random state into it.
2. Rank 0 adds counters, attachments and, last, the manifest; fsyncs; renames to `step_N`; fsyncs.
3. Rank 0 gives the step to the storage, which may upload it in the background.
4. Rank 0 removes the steps that retention gives up.

A failure on any rank fails the save on all ranks, and removes the temporary directory.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointError, RankLost, SaveError
from holdfast.process.events import report
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.remote.uploader import CLOSE_S, Uploader
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import TRAINER_DIR, Retention, list_entries
from holdfast.run.lock import DirectoryLock
from holdfast.run.manifest import FileEntry, Fingerprints, Manifest
from holdfast.run.run_dir import RunDir, older_versions
from holdfast.run.timeline import record
from holdfast.trainer.checkpoint.dcp import ShardWriter
from holdfast.trainer.checkpoint.state import State, capture_random_state
from holdfast.trainer.mesh import RankGroup, describe

_log = logging.getLogger("trainer")
_VALUES_NAME = "progress.json"

Attachment = bytes | Callable[[], bytes]
"""The content of a file to put into a checkpoint, or what makes it when the save is asked for."""


@dataclass(frozen=True)
class Identity:
    """Facts about the run in a manifest: fingerprints of data and config, and `files` of every checkpoint. Retention
    counts and removes only steps of `run_ids`; None: of all runs."""

    run_id: str = ""
    program: str = ""
    data: str = ""
    config: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    run_ids: Collection[str] | None = None


@dataclass(frozen=True)
class Snapshot:
    """Content of a save beside tensors: plain values and generators of this rank as JSON, metrics, files by path."""

    step: int
    values: bytes
    random_state: bytes
    metrics: Mapping[str, float]
    attachments: Mapping[str, bytes]

    @classmethod
    def of(
        cls,
        state: State,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        attachments: Mapping[str, Attachment] | None = None,
    ) -> Self:
        """Return the snapshot of a live state."""
        return cls(
            step,
            msgspec.json.encode(state.values()),
            msgspec.json.encode(capture_random_state()),
            dict(metrics or {}),
            {place: source if isinstance(source, bytes) else source() for place, source in (attachments or {}).items()},
        )


class Storage:
    """Keeps the steps that rank 0 commits. This class leaves steps where they were committed.

    Called on rank 0 only, except `close_s`.

    Args:
        close_s: how long the end of a run may wait for the storage, the same on all ranks.
    """

    def __init__(self, *, close_s: float = 0.0) -> None:
        self.close_s = close_s

    def publish(self, directory: Path) -> None:
        """Take the step committed in `directory`, and return at once. Called by the thread that commits."""

    def release(self, step: int) -> bool:
        """Whether the directory of `step` may be removed: nobody reads it now, nor after this call."""
        return True

    def poll(self) -> None:
        """Raise CheckpointError after a failure since the last call that is not tried again."""

    def close(self, timeout_s: float) -> None:
        """Wait until all published steps are kept. Raise CheckpointError if some are on this machine only."""


class ObjectStorage(Storage):
    """An object store, to which a thread copies every step; see `holdfast.remote`. Raise ConfigError if the URL cannot
    be used, or its driver is not installed.

    Args:
        url: such as `s3://bucket/prefix`.
        retention: which steps are removed there.
        protected: steps to keep there, such as the step that the run was resumed from.
        older_weights: how many earlier versions of published weights a resume from a step needs.
        weights_of: returns the path of a version. Weights are copied before the step.
        run_dir: of the run whose identity is kept beside its steps.
    """

    def __init__(
        self,
        url: str,
        *,
        retention: Retention | None = None,
        protected: Collection[int] = (),
        older_weights: int = 0,
        weights_of: Callable[[int], Path] | None = None,
        run_dir: RunDir | None = None,
    ) -> None:
        super().__init__(close_s=CLOSE_S)
        self._older_weights = older_weights
        self._weights_of = weights_of
        self._uploader = Uploader(
            RemoteCheckpoints(url),
            retention=retention,
            protected=protected,
            older_weights=older_weights,
            run_dir=run_dir,
        )
        self.release = self._uploader.release
        self.poll = self._uploader.poll
        self.close = self._uploader.close

    def publish(self, directory: Path) -> None:
        """Upload the step after the steps before it, unless the store has it."""
        step = int(directory.name.removeprefix("step_"))
        weights: list[Path] = []
        if self._weights_of is not None:
            older = older_versions(step, self._older_weights)
            weights = [path for path in map(self._weights_of, older) if path.exists()]
        self._uploader.submit(directory, step, weights=weights)


class Commit:
    """Writes and commits one checkpoint at a time into `directory`. All methods are collective, except `protect`."""

    def __init__(
        self,
        directory: Path,
        ranks: RankGroup,
        retention: Retention,
        identity: Identity,
        storage: Storage,
        may_remove: Callable[[int], bool] = lambda _: True,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_commit = before_commit
        self._directory = directory
        self._ranks = ranks
        self._writer = ShardWriter(ranks)
        self._retention = retention
        self._identity = identity
        self._storage = storage
        self._may_remove = may_remove
        self._protected: set[int] = set()
        self._lock: DirectoryLock | None = None

    def protect(self, step: int) -> None:
        """Never remove the checkpoint of `step`, which the run was resumed from."""
        self._protected.add(step)

    def _claim_directory(self, final: Path, *, alone: bool) -> None:
        """Lock the directory before the first save, and clear what a dead process left in it. `alone`: whether no other
        process may write beside `final`."""
        if alone and self._lock is None:
            atomic.make_directory(self._directory)
            self._lock = DirectoryLock(self._directory)
            for path in atomic.clear_leftovers(self._directory):
                _log.info("removed %s: it was never committed", path)
        if final.exists():
            entries = list_entries(final.parent, self._identity.run_ids)
            foreign = next((entry.reason for entry in entries if (entry.path, entry.status) == (final, "foreign")), "")
            said = f"{foreign or f'{final} exists already'}, and checkpoints are never written over"
            raise SaveError(f"{said}{'. Move it away, and give the command again' if foreign else ''}")

    def write(
        self,
        snapshot: Snapshot,
        tensors: Mapping[str, Tensor],
        *,
        name: str | None = None,
        stage: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda live: live,
    ) -> None:
        """Write `tensors` and `snapshot` as one committed directory, `step_N` or `name`. If it fails, raise SaveError
        on every rank; nothing of the save is left. Raise RankLost if a rank ended meanwhile; the step is committed, or
        nothing of it is left.

        Args:
            stage: makes the copy that is written.
        """
        final = self._directory / (name or f"step_{snapshot.step}")
        temporary = final.with_name(f"{atomic.TEMPORARY_PREFIX}{final.name}")
        started = time.perf_counter()
        is_ours = False
        try:
            # First: the next optimizer step waits for the copy.
            staged = self._ranks.together(lambda: stage(tensors))
            self._check_same_step(snapshot.step)
            self._ranks.on_main(lambda: self._claim_directory(final, alone=name is None))
            is_ours = True
            self._ranks.on_main(lambda: _make_empty(temporary))
            trainer_dir = temporary / TRAINER_DIR
            shards = self._writer.write(staged, trainer_dir)
            shards |= self._write_random_state(trainer_dir, snapshot.random_state)
            size = self._ranks.on_main(lambda: self._publish(snapshot, tensors, shards, temporary, final))
        except BaseException as error:
            # Before the claim, the temporary directory may be another process's.
            if self._ranks.is_main and is_ours:
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, RankLost) or not isinstance(error, Exception):
                raise
            raise SaveError(
                f"the checkpoint of step {snapshot.step} could not be saved in {self._directory}: {describe(error)}. "
                "Those before it are whole. Make room or mend the storage, then resume with latest."
            ) from error
        if self._ranks.is_main:
            seconds = time.perf_counter() - started
            ended = time.time()
            record("save", ended - seconds, ended, step=snapshot.step, lane="checkpoints")
            report("checkpoint saved", step=snapshot.step, bytes=size, seconds=round(seconds, 3))
            self._after_commit(final)

    def _write_random_state(self, directory: Path, content: bytes) -> dict[str, FileEntry]:
        """Write every rank's file; return all entries on rank 0, whose machine may list the files late."""
        name = f"random_rank_{self._ranks.rank}.json"
        self._ranks.together(lambda: _write_through(directory / name, content))
        return dict(self._ranks.gather((name, manifest.describe(content))))

    def _check_same_step(self, step: int) -> None:
        """Raise RankLost on every rank if the ranks save different steps."""
        steps = self._ranks.all_gather(step)
        if set(steps) != {step}:
            raise RankLost(
                f"the ranks save different steps ({', '.join(map(str, steps))}): a save failed on one of them alone. "
                "Start again from the last checkpoint."
            )

    def _publish(
        self,
        snapshot: Snapshot,
        tensors: Mapping[str, Tensor],
        shards: dict[str, FileEntry],
        temporary: Path,
        final: Path,
    ) -> int:
        written = {f"{TRAINER_DIR}/{name}": entry for name, entry in shards.items()}
        contents = {f"{TRAINER_DIR}/{_VALUES_NAME}": snapshot.values, **self._identity.files, **snapshot.attachments}
        for place, content in contents.items():
            (temporary / place).parent.mkdir(parents=True, exist_ok=True)
            (temporary / place).write_bytes(content)
            written[place] = manifest.describe(content)
        listing = Manifest(
            kind="checkpoint",
            step=snapshot.step,
            policy_version=snapshot.step,  # the weights after step N are version N
            files=_describe_files(temporary, written),
            world_size=self._ranks.world_size,
            mesh=_mesh_of(tensors),
            run_id=self._identity.run_id,
            program=self._identity.program,
            fingerprints=Fingerprints(
                model=fingerprint_tensors(tensors), data=self._identity.data, config=self._identity.config
            ),
            # JSON has finite numbers only.
            metrics={key: value for key, value in snapshot.metrics.items() if math.isfinite(value)},
            libraries=manifest.library_versions(),
        )
        manifest.write_manifest(temporary, listing)
        self._before_commit()
        atomic.publish_directory(temporary, final)
        return sum(entry.size_bytes for entry in listing.files.values())

    def _after_commit(self, final: Path) -> None:
        """Give the step to the storage, then remove superseded steps. Failures are logged: the step is saved."""
        try:
            self._storage.publish(final)
        except Exception as error:  # noqa: BLE001 - logged
            _log.error("%s is saved, but what should follow failed: %s", final, describe(error))
        try:
            atomic.clear_leftovers(self._directory, "step_*-*")  # of a removal that failed half way
            entries = list_entries(self._directory, self._identity.run_ids)
            committed = {
                entry.step: entry.manifest.metrics
                for entry in entries
                if entry.manifest and entry.status == "committed"
            }
            for step in self._retention.superseded(committed, self._protected):
                # The storage last: it drops a waiting upload if it releases the step.
                if self._may_remove(step) and self._storage.release(step):
                    atomic.remove_directory(self._directory / f"step_{step}")
        except Exception as error:  # noqa: BLE001 - logged
            _log.error("%s is saved, but older ones could not be removed: %s", final, describe(error))

    def close(self) -> None:
        """Leave the process group and the directory."""
        self._ranks.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _make_empty(temporary: Path) -> None:
    atomic.make_directory(temporary.parent)
    if temporary.exists():
        shutil.rmtree(temporary)
    (temporary / TRAINER_DIR).mkdir(parents=True)


def _write_through(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    # By its own rank: rank 0 cannot flush the cache of another machine.
    atomic.fsync_file(path)
    atomic.fsync_directory(path.parent)


def _describe_files(directory: Path, written: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Return sizes and checksums as computed while writing, after comparing sizes with the disk."""
    for place, entry in written.items():
        size = (directory / place).stat().st_size
        if size != entry.size_bytes:
            raise SaveError(f"{directory / place} has {size} bytes, {entry.size_bytes} were written")
    return manifest.describe_files(directory, known=written)


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the xxh3-128 of names, shapes and dtypes of the model's tensors."""
    described = sorted(
        (name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items() if name.startswith("model.")
    )
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(described))


def _mesh_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of the dimensions of all meshes; experts may have a mesh of their own."""
    sizes: dict[str, int] = {}
    for mesh in {tensor.device_mesh: None for tensor in tensors.values() if isinstance(tensor, DTensor)}:
        sizes |= dict(zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), mesh.shape, strict=True))
    return sizes


def read_values(directory: Path) -> dict[str, Any]:
    """Return the plain values of a verified checkpoint's trainer directory. Raise CheckpointError if unreadable."""
    path = directory / _VALUES_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
