"""One digest for the weights in a directory, so that trainer, orchestrator and engine can compare them.

It covers the `*.safetensors` files by name, size and content, in the order of their names, and of an adapter how
often its factors count (rank and alpha). Nothing else: a tokenizer or a manifest beside them does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

from holdfast.shared.errors import DataError
from holdfast.shared.files.adapter import ADAPTER_CONFIG_NAME, ADAPTER_NAME, read_scaling
from holdfast.shared.files.manifest import Manifest, file_digest


class WeightsFile(NamedTuple):
    """Name, size in bytes and hexadecimal xxh3-128 of one weights file."""

    name: str
    size_bytes: int
    xxh3_128: str


def weights_files(directory: Path) -> list[Path]:
    """Return the weights files of `directory` in the order in which the digest takes them."""
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def combined_digest(files: Iterable[WeightsFile]) -> str:
    r"""Return the xxh3-128 in hexadecimal over `name\0size\0xxh3_128\n` of every file, sorted by name."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        digest.update(f"{file.name}\0{file.size_bytes}\0{file.xxh3_128}\n".encode())
    return digest.hexdigest()


def scaling_of(directory: Path, names: Iterable[str]) -> list[WeightsFile]:
    """Return what the digest takes of an adapter's settings: nothing where `names`, its files, are whole weights.

    Raises:
        DataError: the settings are missing or damaged.
    """
    if ADAPTER_NAME not in names:
        return []
    scaling = read_scaling(directory)
    text = f"{scaling.r} {float(scaling.lora_alpha)!r}".encode()
    return [WeightsFile(ADAPTER_CONFIG_NAME, len(text), xxhash.xxh3_128_hexdigest(text))]


def weights_digest(directory: Path) -> str:
    """Return the digest of the weights in `directory`.

    Raises:
        DataError: there are no weights files in it, or the settings of an adapter are damaged.
    """
    paths = weights_files(directory)
    if not paths:
        raise DataError(f"{directory} holds no *.safetensors file")
    files = [WeightsFile(path.name, path.stat().st_size, file_digest(path)) for path in paths]
    return combined_digest(files + scaling_of(directory, [file.name for file in files]))


def listed_digest(manifest: Manifest, directory: Path) -> str:
    """Return the digest of the weights in `directory` that its manifest lists; no tensor is read.

    Empty where it lists none.

    Raises:
        DataError: the settings of an adapter are missing or damaged.
    """
    files = [
        WeightsFile(name, entry.size_bytes, entry.xxh3_128)
        for name, entry in manifest.files.items()
        if name.endswith(".safetensors") and "/" not in name
    ]
    return combined_digest(files + scaling_of(directory, [file.name for file in files])) if files else ""
