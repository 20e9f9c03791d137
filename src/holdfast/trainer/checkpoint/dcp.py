"""Sharded tensors on disk in the format of torch.distributed.checkpoint.

Each rank writes its shards into one file, `__R_0.distcp`, and rank 0 writes the index, `.metadata`. Stock
`torch.distributed.checkpoint.load` reads them. Unlike the stock save, this save computes checksums while it writes,
fails if an item was not written, keeps the reason of a failed write, and plans only once in a run.

The index is a pickle, and torch unpickles everything that an index names. `IndexReader` only allows the classes of an
index, so a foreign directory cannot run code.
"""

import gc
import io
import os
import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as torch_dcp
import torch.utils.serialization.config as serialization_config
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointError, is_storage_failure
from holdfast.run.manifest import FileEntry
from holdfast.trainer.mesh import RankGroup

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    _METADATA: {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # of Python 3.13
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an index of tensors")
        return super().find_class(module, name)


class IndexReader(FileSystemReader):
    """Reads a torch.distributed.checkpoint directory of any origin. The index is read once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; torch calls this. Raise UnpicklingError if it names foreign classes."""
        if self._index is None:
            self._index = self._read_index(self._get_metadata_path(kwargs.get("rank")))
        about = getattr(self._index, "storage_meta", None) or StorageMeta()
        about.load_id = self.load_id
        self._index.storage_meta = about
        return self._index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return shape and dtype of every tensor by name. Raise CheckpointError if the index cannot be read."""
        saved = self._entries()
        return {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def only_tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the same. Raise CheckpointError if there is something else than tensors."""
        tensors = self.tensors()
        if others := sorted(self._entries().keys() - tensors.keys()):
            raise CheckpointError(f"{self.directory} holds objects that are not tensors: {some(others)}")
        return tensors

    def _entries(self) -> dict[str, Any]:
        try:
            return self.read_metadata().state_dict_metadata
        except Exception as error:  # unpickling fails in every way there is
            raise CheckpointError(f"{self.directory / '.metadata'} cannot be read: {error}") from error

    def _read_index(self, path: os.PathLike) -> Metadata:
        with self.fs.create_stream(path, "rb") as file, without_garbage_collection():
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}, not an index of tensors")
        return index


@contextmanager
def without_garbage_collection() -> Generator[None, None, None]:
    """Switch the collector off while millions of small objects are made.

    Plans of hundreds of ranks are received five times as fast, and their index is read seven times as fast."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def some(names: list[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "nothing"


_INDEX_WRITTEN = ".metadata.tmp"  # as torch writes the index, before it has its name
_WRITE_BYTES = 1 << 22
_SMALL_BYTES = 1 << 16
_WRITEBACK_BYTES = 1 << 26


class _DigestStream(io.RawIOBase):
    """A file that is hashed while it is written, and keeps the reason of a failed write."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        # O_EXCL: the directory is empty, unless another process writes into it.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = xxhash.xxh3_128()
        self._small = bytearray()  # pickles come in thousands of pieces of a few bytes
        self._position = 0
        self._flushed = 0
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if len(self._small) + len(view) <= _SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            self._write_through(view)
        return len(view)

    def flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._write_through(memoryview(small))

    def _write_through(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            chunk = view[done : done + _WRITE_BYTES]
            try:
                written = os.write(self._descriptor, chunk)
            except OSError as error:
                # torch reports "unexpected pos", which hides a full disk.
                self.failure = OSError(error.errno, error.strerror, str(self._path))
                raise self.failure from None
            self._digest.update(chunk[:written])
            done += written
            self._position += written
            self._start_writeback()

    def _start_writeback(self) -> None:
        """Have the disk write while the rest is still coming, not only in the final fsync."""
        if self._position - self._flushed >= _WRITEBACK_BYTES:
            size = self._position - self._flushed
            # Linux starts to write dirty pages back, without waiting (WB_SYNC_NONE).
            os.posix_fadvise(self._descriptor, self._flushed, size, os.POSIX_FADV_DONTNEED)
            self._flushed = self._position

    def entry(self) -> FileEntry:
        """Return size and checksum of the flushed bytes."""
        return FileEntry(self._position, self._digest.hexdigest())

    def tell(self) -> int:
        return self._position + len(self._small)

    def fileno(self) -> int:
        self.flush()  # the caller is about to fsync
        return self._descriptor

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            try:
                if self.failure is None:
                    self.flush()
            finally:
                self._small.clear()
                os.close(self._descriptor)
        super().close()


class DigestFiles(FileSystem):
    """Opens new files as `_DigestStream`. `entries` has their sizes and checksums."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        """Yield a new file to write."""
        stream = _DigestStream(Path(path))
        try:
            yield stream
            self.entries[Path(path).name] = stream.entry()
        finally:
            self.failure = self.failure or stream.failure
            stream.close()

    @contextmanager
    def telling(self) -> Generator[None, None, None]:
        """Raise the reason of a failed write, which torch hides."""
        try:
            yield
        except (CheckpointException, Exception):
            if self.failure is not None:
                raise self.failure from None
            raise


class ShardWriter:
    """Writes the tensors of all ranks into a directory, and keeps the plan for the next save."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._described: dict[str, Any] | None = None
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._results: list[WriteResult] | None = None
        self._all_results: list[list[WriteResult]] = []

    def write(self, tensors: Mapping[str, Tensor], directory: Path) -> dict[str, FileEntry]:
        """Write and fsync `tensors` into `directory`, which is empty. Collective. Raise SaveError if a rank failed.
        Every rank raises it, with that rank's reason.

        Returns:
            On rank 0, size and checksum of every rank's file and of the index, by name; elsewhere nothing.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # The tensors are on the CPU. Copying ahead would open a context on the first GPU for a thread of every rank.
        files = FileSystemWriter(
            directory, single_file_per_rank=True, sync_files=True, overwrite=False, per_thread_copy_ahead=0
        )
        files.fs = opened = DigestFiles()
        planner.set_up_planner(dict(tensors), files.storage_meta(), self._ranks.is_main)
        files.set_up_storage_writer(self._ranks.is_main, rank=self._ranks.rank, use_collectives=True)
        self._make_plan(tensors, planner, files)
        results = self._ranks.together(lambda: self._write_shards(planner, files, opened))
        # Offsets are mostly unchanged since the last save: then ranks only send checksums.
        is_news = results != self._results
        self._results = results
        gathered = self._ranks.gather((results if is_news else None, dict(opened.entries)))
        self._all_results = [
            new or old for (new, _), old in zip(gathered, self._all_results or [[]] * len(gathered), strict=True)
        ]
        self._ranks.on_main(lambda: files.finish(cast(Metadata, self._metadata), self._all_results))
        index = {".metadata": opened.entries[_INDEX_WRITTEN]} if self._ranks.is_main else {}
        return {name: entry for _, entries in gathered for name, entry in entries.items()} | index

    def _make_plan(self, tensors: Mapping[str, Tensor], planner: DefaultSavePlanner, files: FileSystemWriter) -> None:
        """Agree on the items of every rank, unless all ranks have the same tensors as in the last save."""
        described = {name: _describe(tensor) for name, tensor in tensors.items()}
        if all(self._ranks.all_gather(described == self._described)):
            return
        self._results, self._all_results = None, []
        local = self._ranks.together(lambda: files.prepare_local_plan(planner.create_local_plan()))
        with without_garbage_collection():
            plans = self._ranks.gather(local)

        def make_global() -> list[SavePlan]:
            with without_garbage_collection():
                made, self._metadata = planner.create_global_plan(plans)
                return files.prepare_global_plan(made)

        self._plan = self._ranks.scatter(self._ranks.on_main(make_global) or [])
        self._described = described

    def _write_shards(
        self, planner: DefaultSavePlanner, files: FileSystemWriter, opened: DigestFiles
    ) -> list[WriteResult]:
        assert self._plan is not None
        plan = planner.finish_plan(self._plan)
        # The checksum is enough.
        patch = serialization_config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]  # added at import
        with opened.telling(), patch:
            written = cast(list[WriteResult], files.write_data(plan, planner).value())
        if len(written) != len(plan.items):
            raise OSError(f"{len(plan.items) - len(written)} of {len(plan.items)} tensors were not written")
        return written


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):
        return (tensor.shape, tensor.dtype, tensor.device_mesh, tuple(tensor.placements))
    return (tensor.shape, tensor.dtype)


def read_tensors(tensors: Mapping[str, Tensor], index: IndexReader) -> None:
    """Fill `tensors` in place; the directory of `index` may hold more. Collective."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            torch_dcp.load(dict(tensors), storage_reader=index)
    except CheckpointException as error:  # a BaseException: `except Exception` would miss it
        reasons = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
        causes = [failure for failure, _ in error.failures.values()]
        # A failure of the storage decides the exit code.
        raise CheckpointError(f"loading {index.directory} failed: {reasons}") from max(causes, key=is_storage_failure)


def check_same_tensors(
    tensors: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata], directory: Path
) -> None:
    """Refuse a checkpoint if its tensors are not exactly `tensors`."""
    missing, surplus = sorted(tensors.keys() - saved.keys()), sorted(saved.keys() - tensors.keys())
    if missing or surplus:
        raise CheckpointError(
            f"{directory} does not fit this model: it lacks {some(missing)} and has besides {some(surplus)}"
        )
    for name, tensor in tensors.items():
        entry = saved[name]
        if entry.size != tensor.shape or entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{directory} does not fit this model: {name} is {tuple(entry.size)} {entry.properties.dtype} there, "
                f"{tuple(tensor.shape)} {tensor.dtype} here"
            )
