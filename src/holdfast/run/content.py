"""Files that settings name, known by what is in them: a path says nothing about that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

_WHOLE_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20
_BLOCKS = 256
_LONGEST_PATH = 4096


def content_digest(path: Path) -> str:
    """Return a digest of a file: of all its bytes, or of 256 MB of a file of over 1 GB, evenly spread, and its size.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    step = _BLOCK_BYTES if size <= _WHOLE_BYTES else (size - _BLOCK_BYTES) // (_BLOCKS - 1)
    with path.open("rb", buffering=0) as file:
        for position in range(0, size, step):
            file.seek(position)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def files_named_in(args: Mapping[str, Any], prefix: str = "args.") -> Iterator[tuple[str, Path]]:
    """Yield where in `args` a file of this machine is named, at any depth, and the file."""
    for key, value in args.items():
        if isinstance(value, str) and 0 < len(value) < _LONGEST_PATH and "\0" not in value and Path(value).is_file():
            yield prefix + key, Path(value)
        elif isinstance(value, Mapping):
            yield from files_named_in(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from files_named_in({str(place): one for place, one in enumerate(value)}, f"{prefix}{key}.")
