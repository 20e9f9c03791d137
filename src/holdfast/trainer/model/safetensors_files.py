"""Writes tensors into safetensors files: the same bytes as safetensors writes, without a copy, hashed on the way."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch
import xxhash
from torch import Tensor

from holdfast.errors import DataError
from holdfast.protocol import transfer
from holdfast.protocol.transfer import TensorEntry
from holdfast.run.manifest import FileEntry

MAX_FILE_BYTES = 4 << 30
SINGLE_NAME = "model.safetensors"
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip


@dataclass(frozen=True)
class SafetensorsFile:
    """One file: its tensors, contiguous and on the CPU, in the order of their bytes."""

    entries: list[TensorEntry]
    tensors: list[Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the file of named tensors. Raise DataError if a dtype cannot be written."""
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise DataError(f"tensor '{name}' has dtype {tensor.dtype}, which no weights are written in")
        entries: list[TensorEntry] = []
        at = 0
        order = transfer.in_file_order((name, _DTYPES[tensor.dtype]) for name, tensor in tensors.items())
        for name in order:
            tensor = tensors[name]
            end = at + tensor.numel() * tensor.element_size()
            entries.append(TensorEntry(name, _DTYPES[tensor.dtype], tuple(tensor.shape), at, end))
            at = end
        return cls(entries, [tensors[name] for name in order])

    def describe(self) -> FileEntry:
        """Return size and checksum, as `holdfast.run.manifest` finds them on the disk."""
        return self._entry(lambda _: None)

    def write(self, path: Path) -> FileEntry:
        """Write a new file; return its size and checksum."""
        with open(path, "xb") as file:
            return self._entry(file.write)

    def _entry(self, take: Callable[[bytes | memoryview], object]) -> FileEntry:
        checksum, size = xxhash.xxh3_128(), 0
        for part in self._parts():
            take(part)
            checksum.update(part)
            size += len(part)
        return FileEntry(size, checksum.hexdigest())

    def _parts(self) -> Iterator[bytes | memoryview]:
        yield transfer.header_bytes(transfer.encode_header(self.entries))
        for tensor in self.tensors:
            yield bytes_of(tensor).numpy().data


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor; they share its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def split_files(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, list[tuple[str, Tensor]]]]:
    """Return the files, by their names, into which a `SafetensorsWriter` divides these tensors."""
    files: list[list[tuple[str, Tensor]]] = []
    size = 0
    for name, tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if not files or size + own > MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append((name, tensor))
        size += own
    names = (
        [SINGLE_NAME] if len(files) == 1 else [_file_name("model", number, len(files)) for number in range(len(files))]
    )
    return list(zip(names, files, strict=True))


def _file_name(name: str, number: int, num_files: int) -> str:
    """Return the name of file `number`, from 0, of several."""
    return f"{name}-{number + 1:05d}-of-{num_files:05d}.safetensors"


class SafetensorsWriter:
    """Writes tensors that come one by one into safetensors files, and holds the tensors of one file at most.

    The files get their names when all are written. Counts tensors, elements and bytes."""

    def __init__(self, directory: Path, *, max_file_bytes: int | None = None, name: str = "model") -> None:
        self._directory = directory
        self._name = name
        self._max_file_bytes = MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[tuple[Path, list[str], FileEntry]] = []
        self.num_tensors = 0
        self.num_elements = 0
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one contiguous CPU tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > self._max_file_bytes:
            self._write_waiting()
        self._waiting[name] = tensor
        self._waiting_bytes += size
        self.num_tensors += 1
        self.num_elements += tensor.numel()
        self.num_bytes += size

    def close(self) -> dict[str, FileEntry]:
        """Write what is left and give the files their usual names, with an index where there are several.

        Returns:
            Size and checksum of the files with tensors, by name.
        """
        self._write_waiting()
        if len(self._files) == 1:
            path, _, entry = self._files[0]
            path.rename(self._directory / f"{self._name}.safetensors")
            return {f"{self._name}.safetensors": entry}
        written: dict[str, FileEntry] = {}
        weight_map: dict[str, str] = {}
        for number, (path, names, entry) in enumerate(self._files):
            final = _file_name(self._name, number, len(self._files))
            path.rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
            written[final] = entry
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._directory / f"{self._name}.safetensors.index.json").write_bytes(msgspec.json.encode(index))
        return written

    def _write_waiting(self) -> None:
        path = self._directory / f"part-{len(self._files)}.safetensors"
        entry = SafetensorsFile.of(self._waiting).write(path)
        self._files.append((path, list(self._waiting), entry))
        self._waiting, self._waiting_bytes = {}, 0
