"""Directories of temporary files that are removed however their process ends.

A process holds a lock on a file in its directory, and the kernel lets go of that when the process is over, be it by
`kill -9`. A directory whose lock nobody holds is abandoned, and the next process removes it.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = ".lock"
SHORT_HOME = Path("/tmp")
"""For sockets, whose paths have 107 bytes at most, where the directory for temporary files has a long name."""
_held: dict[Path, int] = {}  # of this process: opening and closing one would release its lock


def scratch_name() -> str:
    """Return what the names of all directories of this user on this host begin with. They name the host:
    some filesystems that hosts share keep the locks of each host apart."""
    return f"holdfast-{os.getuid()}-{zlib.crc32(socket.gethostname().encode()):08x}-"


@contextmanager
def scratch_directory(home: Path | None = None) -> Iterator[Path]:
    """Have a directory in `home` within the block; unset: where temporary files belong."""
    path = make_scratch(home or Path(tempfile.gettempdir()))
    try:
        yield path
    finally:
        drop(path)


def make_scratch(home: Path) -> Path:
    """Make a directory in `home` for this process, and remove abandoned ones."""
    remove_abandoned(home)
    while True:
        path = Path(tempfile.mkdtemp(prefix=scratch_name(), dir=home))
        if hold(path):
            return path


def hold(path: Path) -> bool:
    """Mark the directory as in use until `drop` or the end of this process; False if it was just removed. On a
    filesystem without locks nothing is marked, and other processes remove nothing."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return False
    try:
        # Not flock: a forked child would keep holding it.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        is_there = os.path.samestat(os.fstat(lock), os.stat(path / LOCK_NAME))  # noqa: PTH116 - beside fstat
    except FileNotFoundError:
        is_there = False
    except OSError:
        os.close(lock)
        (path / LOCK_NAME).unlink(missing_ok=True)
        return True
    if not is_there:
        os.close(lock)
        return False
    _held[path.resolve()] = lock
    return True


def drop(path: Path) -> None:
    """Remove the directory, which this process holds."""
    _remove(path, _held.pop(path.resolve(), None))


def remove_abandoned(home: Path | None = None) -> None:
    """Remove what processes of this user that are over have left in `home`; what is in use stays. `home`: unset: the
    directory of temporary files."""
    homes = _homes() if home is None else {home}
    for path in [path for one in homes for path in one.glob(f"{scratch_name()}*")]:
        if path.resolve() in _held:
            continue
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it has none, or is gone already
            continue
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use
            os.close(lock)
            continue
        _remove(path, lock)


def _remove(path: Path, held: int | None) -> None:
    """Remove a directory, and close its lock `held`. If a process still writes there, the file of the lock stays,
    for the next `remove_abandoned`."""
    lock = path / LOCK_NAME
    try:
        with contextlib.suppress(OSError):
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry != lock:
                    entry.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    finally:
        if held is not None:
            os.close(held)  # before `rmdir`: NFS keeps an open file in the directory, under another name
    with contextlib.suppress(OSError):
        try:
            path.rmdir()
        except OSError:
            lock.touch(0o600)


def _homes() -> set[Path]:
    try:
        return {Path(tempfile.gettempdir()), SHORT_HOME}
    except OSError:  # none takes a file now
        return {SHORT_HOME}
