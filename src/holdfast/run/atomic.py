"""Writing files so that a crash at any moment leaves the old content or the new, never half.

Publishing is always the same: write to a temporary name in the same directory, fsync the files,
rename, fsync the directory. Everything durable in the project goes through this module.
"""

import os
import shutil
import uuid
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"
_MOST_TURNS = 100


def temporary_sibling(path: Path) -> Path:
    """Return a fresh temporary name in the directory of `path`."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")


def fsync_file(path: Path) -> None:
    """Flush the content of one file to the disk."""
    # Read-only suffices: fsync flushes the file for all writers, and needs no permission to write.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Flush the entries of one directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, durably, so that files published in it are not lost with it."""
    if path.is_dir():
        return
    make_directory(path.parent)
    # exist_ok: another process may make it meanwhile.
    path.mkdir(exist_ok=True)
    # A new name is durable only when the directory that holds it is flushed.
    fsync_directory(path.parent)


def fsync_tree(path: Path) -> None:
    """Flush every file and directory below `path` (and `path` itself) to the disk. Raise OSError if a directory or file
    could not be listed or flushed."""

    def fail(error: OSError) -> None:  # os.walk itself passes over what it cannot list
        raise error

    for directory, _, files in os.walk(path, onerror=fail):
        for name in files:
            # Files before the directory that names them: a durable name must never lead to half a file.
            fsync_file(Path(directory) / name)
        fsync_directory(Path(directory))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, or raise."""
    left = memoryview(data)
    while left:
        # A disk that fills up takes a part first, and gives its error for the rest only.
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, data: bytes) -> None:
    """Replace `path` by a file with content `data`, atomically and durably."""
    make_directory(path.parent)
    temporary = temporary_sibling(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            # Before the rename: else a power cut may leave the new name with no content.
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # After the rename: it is durable only now; what the caller does next may depend on it.
    fsync_directory(path.parent)


def link_or_copy(source: Path, target: Path) -> bool:
    """Put the file `source` at `target` too; return whether it could be linked."""
    try:
        os.link(source, target)
        return True
    except OSError:  # another filesystem, or one without links
        shutil.copyfile(source, target)
        return False


def publish_directory(temporary: Path, final: Path) -> None:
    """Give a complete directory its final name, durably. `final` must not exist. Raise FileExistsError if `final`
    exists; published directories are never written over."""
    # rename would quietly replace an empty directory.
    if final.exists():
        raise FileExistsError(f"{final} exists already; published directories are never overwritten")
    # All content before the rename: the name promises the content.
    fsync_tree(temporary)
    os.rename(temporary, final)
    fsync_directory(final.parent)


def remove_directory(path: Path) -> None:
    """Remove a published directory; a crash half way leaves a temporary name, never a half of it."""
    doomed = temporary_sibling(path)
    os.rename(path, doomed)
    # Before the first file goes: a power cut must not bring the name back over half a directory.
    fsync_directory(path.parent)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a directory tree, a file, or a link (not its target)."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
    turns = 0
    while path.is_dir() and not path.is_symlink():
        turns += 1
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # another process clears it at the same time; or a storage lists files that are gone
            if turns == _MOST_TURNS:
                raise


def is_gone(path: Path) -> bool:
    """Return whether nothing is at `path`; not so where the storage cannot say."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def is_visible(path: Path) -> bool:
    """Return whether `path` is there, asked of who has the disk where that is another machine. NFS remembers for up to
    a minute that there was nothing of a name, until the directory that holds it is opened."""
    try:
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    except FileNotFoundError:  # which may be remembered as well
        return is_visible(path.parent) and path.exists()
    except (PermissionError, NotADirectoryError):  # listing failed; a direct lookup may still work
        return path.exists()
    return path.exists()


def clear_leftovers(parent: Path, names: str = "*") -> list[Path]:
    """Remove what interrupted writers left in `parent` of files with these `names`, and return what was removed."""
    if not parent.is_dir():
        return []
    leftovers = sorted(parent.glob(f"{TEMPORARY_PREFIX}{names}"))
    for path in leftovers:
        _remove(path)
    return leftovers
