"""One digest for the weights in a directory, so that trainer, orchestrator and engine can compare them.

It covers the `*.safetensors` files by name, size and content, in the order of their names, and
nothing else: a tokenizer or a manifest beside them does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

from triad.errors import DataError
from triad.manifest import Manifest, file_digest


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


def weights_digest(directory: Path) -> str:
    """Return the digest of the weights in `directory`.

    Raises:
        DataError: there are no weights files in it.
    """
    paths = weights_files(directory)
    if not paths:
        raise DataError(f"{directory} holds no *.safetensors file")
    return combined_digest(WeightsFile(path.name, path.stat().st_size, file_digest(path)) for path in paths)


def listed_digest(manifest: Manifest) -> str:
    """Return the digest of the weights that `manifest` lists; no file is read. Empty where it lists none."""
    files = [
        WeightsFile(name, entry.size_bytes, entry.xxh3_128)
        for name, entry in manifest.files.items()
        if name.endswith(".safetensors") and "/" not in name
    ]
    return combined_digest(files) if files else ""
