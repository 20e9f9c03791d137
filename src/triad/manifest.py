"""`manifest.json`: the list of a published directory's files with sizes and checksums.

It is written last, so it is the commit: a checkpoint step without a valid manifest does not exist.
Checksums are xxh3-128, which runs at memory speed; they detect damage, not malice.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from triad import durable
from triad.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_READ_BYTES = 1 << 22


class FileEntry(msgspec.Struct, frozen=True):
    """Size and checksum of one file."""

    size_bytes: int
    xxh3_128: str


class Manifest(msgspec.Struct, kw_only=True):
    """What a published directory holds.

    Attributes:
        kind: what the directory is.
        step: optimizer steps done when it was made; for a batch, the step that trains on it.
        policy_version: version of the weights inside, or of the weights that made the batch.
        files: path relative to the directory -> size and checksum, without the manifest itself.
        world_size: ranks that wrote it.
        run_id: id of the run that wrote it.
        config: fingerprint of the configuration that shapes training.
        libraries: versions of the libraries that wrote it.
    """

    format: int = FORMAT_VERSION
    kind: Literal["checkpoint", "weights", "batch"]
    step: int
    policy_version: int
    files: dict[str, FileEntry]
    world_size: int = 1
    run_id: str = ""
    config: str = ""
    libraries: dict[str, str] = {}


def library_versions() -> dict[str, str]:
    """Return the versions of python and of the libraries that decide a checkpoint's content."""
    found = {"python": platform.python_version()}
    for name in ("triad", "torch", "transformers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file's content in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe_files(directory: Path) -> dict[str, FileEntry]:
    """Return size and checksum of every file below `directory` except its manifest."""
    return {
        str(path.relative_to(directory)): FileEntry(path.stat().st_size, file_digest(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST_NAME
    }


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Commit `directory`: write its manifest durably."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    durable.write_file(directory / MANIFEST_NAME, data)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of `directory`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {MANIFEST_NAME}: it was never committed") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if manifest.format != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads format {FORMAT_VERSION}")
    return manifest


def is_committed(directory: Path) -> bool:
    """Return whether `directory` has a readable manifest."""
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def verify(directory: Path) -> Manifest:
    """Check every file of `directory` against its manifest, and return the manifest.

    Raises:
        CheckpointError: naming the first file that is missing, of another size, or damaged.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CheckpointError(f"{path} is damaged: {size} bytes, the manifest says {entry.size_bytes}")
        digest = file_digest(path)
        if digest != entry.xxh3_128:
            raise CheckpointError(f"{path} is damaged: checksum {digest}, the manifest says {entry.xxh3_128}")
    return manifest
