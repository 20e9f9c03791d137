"""What a power cut may leave of a directory, before every call that orders writes: any part of the difference between
it and what is durable by POSIX. Names without contents, contents without names, both names, half of an append, zeros:
filesystems that write names in order leave less than this model."""

from __future__ import annotations

import functools
import os
import pickle
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.faults.faulty_calls import path_of

Survival = Literal["synced", "names", "contents", "torn"]
"""Of what was not flushed: nothing, all names, all contents, or any part of either."""
SURVIVALS: tuple[Survival, ...] = ("synced", "names", "contents", "torn")

_ORDERING = ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove", "rmdir")
# A name that is there when the call returns; nothing is durable by it, so nothing has to be remembered before it.
_CREATING = ("mkdir", "symlink")
# Files that change twice within a tick of the kernel's clock look unchanged.
_CLOCK_TICK_NS = 50_000_000
Names = dict[str, int]


@dataclass
class Disk:
    """Directories and files by the numbers of their inodes."""

    names: dict[int, Names] = field(default_factory=dict)  # directory -> what it holds
    contents: dict[int, int] = field(default_factory=dict)  # file -> the key of its content in `Recording.blobs`


@dataclass(frozen=True)
class Instant:
    call: str  # the function and its path
    live: Disk  # what processes see
    durable: Disk  # what is safe


@dataclass
class Recording:
    root: int  # inode of the directory
    instants: list[Instant] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=lambda: [b""])  # contents of files

    @classmethod
    def load(cls, path: Path) -> Recording:
        return pickle.loads(path.read_bytes())

    def crash(self, instant: Instant, survival: Survival, target: Path, generator: random.Random) -> None:
        """Write into the new directory `target` what a power cut before a call may leave."""
        self._write(instant, self.root, survival, target, generator)

    def _write(self, instant: Instant, inode: int, survival: Survival, path: Path, generator: random.Random) -> None:
        if inode not in instant.live.names and inode not in instant.durable.names:
            path.write_bytes(self._content(instant, inode, survival, generator))
            return
        path.mkdir()
        safe, seen = instant.durable.names.get(inode, {}), instant.live.names.get(inode, {})
        for name in sorted(safe.keys() | seen.keys()):
            if survival in ("synced", "contents"):
                kept = safe.get(name)
            elif survival == "names":
                kept = seen.get(name)
            else:
                kept = generator.choice((safe.get(name), seen.get(name)))
            if kept is not None:
                self._write(instant, kept, survival, path / name, generator)

    def _content(self, instant: Instant, inode: int, survival: Survival, generator: random.Random) -> bytes:
        safe = self.blobs[instant.durable.contents.get(inode, 0)]
        seen = self.blobs[instant.live.contents.get(inode, instant.durable.contents.get(inode, 0))]
        if safe == seen or survival in ("synced", "names"):
            return safe
        if survival == "contents":
            return seen
        kept = len(safe) if seen.startswith(safe) else 0
        half = seen[: generator.randint(kept, len(seen))]
        return generator.choice((safe, seen, half, half + bytes(len(seen) - len(half))))


def record(directory: Path) -> Callable[[Path], None]:
    """Remember from now on what happens in `directory` in this process; what is there already is durable.

    Returns:
        a function that writes the recording into a file, for `Recording.load`"""
    recorder = _Recorder(directory)
    for name in (*_ORDERING, *_CREATING):
        setattr(os, name, recorder.watched(name, getattr(os, name)))
    return recorder.save


class _Recorder:
    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._lock = threading.RLock()
        self._pins: dict[int, int] = {}
        self._read: dict[int, tuple[tuple[int, int], int]] = {}
        self._keys = {b"": 0}
        self._recording = Recording(directory.stat().st_ino)
        self._durable = self._scan()

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            path = path_of(arguments[0], options)
            if not (path == self._directory or path.startswith(f"{self._directory}/")):
                return real(*arguments, **options)
            with self._lock:
                live = self._scan()
                if name in _ORDERING:
                    durable = Disk(dict(self._durable.names), dict(self._durable.contents))
                    where = f"{name} {os.path.relpath(path, self._directory)}"
                    self._recording.instants.append(Instant(where, live, durable))
                result = real(*arguments, **options)
                if name in ("fsync", "fdatasync"):
                    inode = os.fstat(arguments[0]).st_ino
                    if inode in live.names:
                        self._durable.names[inode] = live.names[inode]
                    elif inode in live.contents:
                        self._durable.contents[inode] = live.contents[inode]
                return result

        return call

    def _scan(self) -> Disk:
        disk = Disk()
        for directory, inode in self._directories(self._directory, self._recording.root):
            names: Names = {}
            for entry in _entries(directory):
                status = _status(entry)
                if status is None:
                    continue  # removed by somebody else just now
                if not self._pin(entry.path, status.st_ino):
                    continue
                names[entry.name] = status.st_ino
                if stat.S_ISREG(status.st_mode):
                    disk.contents[status.st_ino] = self._blob(entry.path, status)
            disk.names[inode] = names
        return disk

    def _directories(self, path: str, inode: int) -> Iterator[tuple[str, int]]:
        yield path, inode
        for entry in _entries(path):
            if entry.is_dir(follow_symlinks=False):
                yield from self._directories(entry.path, entry.inode())

    def _pin(self, path: str, inode: int) -> bool:
        """Keep an inode, so that its number never means another file; False if it was removed just now."""
        if inode not in self._pins:
            try:
                self._pins[inode] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
            except FileNotFoundError:
                return False
        return True

    def _blob(self, path: str, status: os.stat_result) -> int:
        version = (status.st_size, status.st_mtime_ns)
        known = self._read.get(status.st_ino)
        if known is not None and known[0] == version and time.time_ns() - status.st_mtime_ns > _CLOCK_TICK_NS:
            return known[1]
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:  # removed by another process just now
            content = b""
        key = self._keys.get(content)
        if key is None:
            key = self._keys[content] = len(self._recording.blobs)
            self._recording.blobs.append(content)
        self._read[status.st_ino] = (version, key)
        return key

    def save(self, path: Path) -> None:
        """Write the recording, with the moment after its last call."""
        with self._lock:
            self._recording.instants.append(Instant("end", self._scan(), self._durable))
            path.write_bytes(pickle.dumps(self._recording))


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
