"""A storage that does not give what lies on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Make every read of `path` fail: the kernel answers with an I/O error for address 0 of a process."""
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    path.symlink_to("/proc/self/mem")
    try:
        yield
    finally:
        path.unlink()
        kept.rename(path)
