"""The disk that a chaos run lies on: small, and filled up now and then."""

import errno
from pathlib import Path
from typing import Self

from tests.faults.disks import Disk

_BLOCK_BYTES = 4096


class SmallDisk:
    """A tmpfs of its own at `place`; used as a context manager, it is gone with all that is on it at the end."""

    def __init__(self, place: Path, *, size_mib: int) -> None:
        place.mkdir(parents=True)
        self._disk = Disk(f"mount -t tmpfs -o size={size_mib}m tmpfs {place}")
        self.problem = self._disk.problem  # why it cannot be had here; None if it is there
        self.path = self._disk.view(place)  # where every process finds it
        self._ballast = self.path / "ballast"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.__exit__()

    def fill(self) -> None:
        """Take all the space that is free now; what is freed later is free until the next call."""
        with open(self._ballast, "ab", buffering=0) as ballast:
            for size in (256 * _BLOCK_BYTES, _BLOCK_BYTES):
                try:
                    while True:
                        ballast.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def release(self) -> None:
        self._ballast.unlink()
