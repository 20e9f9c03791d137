"""Locks of files that say who holds them; the kernel frees one when the last process of its holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from holdfast.errors import RunDirError

# Processes of a killed holder, such as its ranks, end within moments; on a busy machine later.
_DYING_S = 30.0
_LOOK_AGAIN_S = 0.05  # no call waits for a lock of a file with a limit of time
_MOST_BYTES = 512
_CLOCK_SLACK_S = 60.0  # the start of a process is known by the time since the boot, files by the clock of their storage
# Some network filesystems lock no directories; then nobody notices a second writer.
_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# Locks of this process and of the processes that it was forked from.
_own: set[tuple[int, Path]] = set()


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock, as it wrote itself into the file. `pid_space`: boot of the kernel and container,
    within which its process id is valid."""

    pid: int
    host: str
    pid_space: str

    @classmethod
    def me(cls) -> Holder:
        """Return this process."""
        return cls(os.getpid(), socket.gethostname(), _pid_space())

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """Return who is written in an open file; None where that is nobody yet."""
        words = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").split()
        return cls(int(words[0]), words[1], words[2]) if len(words) == 3 and words[0].isdecimal() else None

    def write(self, descriptor: int) -> None:
        """Write this holder into an open file."""
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{self.pid} {self.host} {self.pid_space}\n".encode(), 0)

    @property
    def is_dead(self) -> bool:
        """Whether it has certainly ended, so that only its children can hold the lock."""
        # A process id of another kernel or container says nothing here: take its holder for living.
        if self.pid_space != _pid_space():
            return False
        import psutil  # takes 0.03 s, and few processes come here

        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True

    @property
    def is_here(self) -> bool:
        """Whether the holder belongs to the same boot and container as this process."""
        return self.pid_space == _pid_space()

    def __str__(self) -> str:
        """Return `process 123`, with the host where it is another."""
        return f"process {self.pid}" + ("" if self.host == socket.gethostname() else f" on {self.host}")


def take(path: Path, *, over_exec: bool = False) -> Holder | None:
    """Take the lock `path` for as long as this process and the children that it forks live.

    A lock whose holder was killed is waited for while what it started ends.

    Args:
        over_exec: keep it when this process becomes another program.

    Returns:
        None, or who has it

    Raise OSError if the file cannot be opened; RunDirError if nothing can be locked there, or the processes of a holder
    that was killed do not end.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.set_inheritable(descriptor, over_exec)
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            # Not lockf: POSIX locks are lost with any close of the file, and children do not inherit them.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = Holder.read(descriptor)
            # None: the holder is about to write its name; look again.
            if holder is not None and not holder.is_dead:
                os.close(descriptor)
                return holder
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise RunDirError(
                    f"{path} is held by a process that {holder or 'somebody'} started and that did not end with it "
                    f"within {_DYING_S:g} s. Find it with `fuser {path}`, and stop it."
                ) from None
            time.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            os.close(descriptor)
            raise _without_locks(path, error) from error
    # Never closed: the lock lasts as long as the process, whatever becomes of the objects in it.
    Holder.me().write(descriptor)
    # With the id of this process: a fork inherits the set, and has not taken the lock.
    _own.add((os.getpid(), path.absolute()))
    return None


def is_own(path: Path) -> bool:
    """Whether this process has taken the lock `path`; looks at no file."""
    return (os.getpid(), path.absolute()) in _own


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock `path`; processes of a killed holder do not count."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: readers must not exclude each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = Holder.read(descriptor)
        return holder is None or not holder.is_dead
    except OSError as error:
        raise _without_locks(path, error) from error
    else:
        return False
    finally:
        os.close(descriptor)


def _without_locks(path: Path, error: OSError) -> RunDirError:
    return RunDirError(
        f"{path} cannot be locked: {error.strerror}. Two runs could write into one directory unnoticed, so it takes a "
        "filesystem with flock: mount Lustre with -o flock and NFS with its lock service, or choose a directory "
        "elsewhere with --output-dir."
    )


def living_holder(path: Path) -> Holder | None:
    """Return who has written itself into the lock `path` and is not known to have ended; touches no lock. Asking the
    kernel for the lock, as `is_held` does, could refuse a process that takes it at the same moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder, taken = Holder.read(descriptor), os.fstat(descriptor).st_mtime
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if holder is None or holder.is_dead:
        return None
    if not holder.is_here:
        return holder
    import psutil

    try:
        begun = psutil.Process(holder.pid).create_time()
    except psutil.Error:
        return None
    # Another process may have its number by now: it would have started after the lock was taken.
    return holder if begun <= taken + _CLOCK_SLACK_S else None


class DirectoryLock:
    """A lock on a directory itself, for its writer. Locks of one process on a directory are shared."""

    _held: ClassVar[dict[Path, tuple[int, int]]] = {}

    def __init__(self, path: Path) -> None:
        """Take it; wait for a holder that is about to end. Raise RunDirError if another process has it."""
        self._path = path.resolve()
        # flock is of the open file: a second one of the same process would wait for the first.
        descriptor, holders = self._held.get(self._path, (-1, 0))
        if not holders:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            deadline = time.monotonic() + _DYING_S
            while _is_taken(descriptor):
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise RunDirError(f"another process saves into {path}. Stop it, or choose another directory.")
                time.sleep(_LOOK_AGAIN_S)
        self._held[self._path] = (descriptor, holders + 1)

    def release(self) -> None:
        """Give it back."""
        descriptor, holders = self._held.pop(self._path)
        if holders > 1:
            self._held[self._path] = (descriptor, holders - 1)
        else:
            os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    """Whether another open file has the lock on the directory of `descriptor`; if not, this one has it now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return False


def _pid_space() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # a sandbox that does not tell
        import psutil

        return f"{psutil.boot_time():.0f}"
