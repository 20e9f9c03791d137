"""Small, broken and read-only disks: real filesystems in a mount namespace of a holder process, which runs enter and
the test sees through /proc. All is gone when the holder ends."""

import ctypes
import errno
import os
import subprocess
from pathlib import Path
from typing import Self

_BLOCK_BYTES = 4096
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


class Disk:
    """Mounts made by `script`, a shell script, in a namespace of their own; used as a context manager. `needs_root`: it
    mounts what a user namespace may not mount, such as an image of a disk. `problem`: why it cannot be had here; None
    if it is there."""

    def __init__(self, script: str, *, needs_root: bool = False) -> None:
        flags = ["-m"] if needs_root else ["-Urm"]
        self._holder = subprocess.Popen(
            ["unshare", *flags, "--propagation", "private", "sh", "-c", f"set -e\n{script}\necho ready\nexec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._stdin, self._stdout = self._holder.stdin, self._holder.stdout
        said = []
        for line in self._stdout:
            if line == "ready\n":
                self.problem = None
                return
            said.append(line)
        self.problem = "".join(said).strip() or "no namespace of its own"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stdin.close()
        self._holder.wait()
        self._stdout.close()

    @property
    def fault(self) -> str:
        """Source that makes a forked run see the mounts."""
        return f"from tests.faults.disks import enter\nenter({self._holder.pid})\n"

    def view(self, path: Path) -> Path:
        """Where this process finds what `path` is in there."""
        return Path(f"/proc/{self._holder.pid}/root{path}")


class SmallDisk(Disk):
    """A tmpfs at `place`, which every process finds at `path`."""

    def __init__(self, place: Path, *, size_mib: int = 0, size_bytes: int = 0) -> None:
        place.mkdir(parents=True, exist_ok=True)
        super().__init__(f"mount -t tmpfs -o size={size_bytes or size_mib << 20} tmpfs {place}")
        self.path = self.view(place)
        self.ballast = self.path / "ballast"

    def fill(self) -> None:
        """Take all the space that is free now; what is freed later is free until the next call."""
        with open(self.ballast, "ab", buffering=0) as ballast:
            for size in (256 * _BLOCK_BYTES, _BLOCK_BYTES):
                try:
                    while True:
                        ballast.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def release(self) -> None:
        self.ballast.unlink()


def enter(pid: int) -> None:
    """Enter user and mount namespace of a process, this one having a single thread."""
    here = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in (("user", _CLONE_NEWUSER), ("mnt", _CLONE_NEWNS)):
        theirs = Path(f"/proc/{pid}/ns/{name}")
        if theirs.stat().st_ino == Path(f"/proc/self/ns/{name}").stat().st_ino:
            continue
        descriptor = os.open(theirs, os.O_RDONLY)
        if libc.setns(descriptor, kind) != 0:
            raise OSError(ctypes.get_errno(), f"entering the {name} namespace of {pid}")
        os.close(descriptor)
    os.chdir(here)


def drop_capabilities() -> None:
    """Have file permissions count for this process, also if it is root's."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")
