"""Watches whether processes live: by their heartbeats, and by answers of the health route of a server.

Times in which the launcher itself was frozen do not count.
"""

import functools
import hashlib
import http.client
import os
import shutil
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.process.heartbeat import PERIOD_S, Beat, awake_s, read_beat
from holdfast.process.scratch import drop, hold, make_scratch, remove_abandoned, scratch_name

PROBE_PERIOD_S = 5.0
# A process imports before its first beat, for seconds on a busy machine.
_FIRST_BEAT_S = 30.0
_MEMORY = Path("/dev/shm")


def open_directly(request: str | urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    """Open a URL of a server of a run without the proxies of the environment, which are for the internet."""
    return _opener().open(request, timeout=timeout_s)


@functools.cache  # it may read all certificates
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def place_of_beats(run_dir: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Make a directory for the heartbeats of the run in `run_dir`, in memory if possible; remove it at the end.
    `is_shared`: processes of other hosts send heartbeats as well: it is in `run_dir`, which they see. The next launcher
    takes over the directory of a killed one, or the launcher of another run removes it."""
    if is_shared:
        place = run_dir.absolute() / "beats"
        place.mkdir(mode=0o700, exist_ok=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return
    home = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    status = run_dir.stat()  # containers may share the memory
    digest = hashlib.sha256(f"{status.st_dev} {status.st_ino} {run_dir}".encode()).hexdigest()[:16]
    remove_abandoned(home)
    place = _held_place(home / f"{scratch_name()}{digest}")
    try:
        yield place
    finally:
        drop(place)


def _held_place(place: Path) -> Path:
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return make_scratch(Path(tempfile.gettempdir()))
    # Anyone may write to /dev/shm, and can guess the name.
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        return make_scratch(Path(tempfile.gettempdir()))
    # Not held: another launcher removed it this moment, as abandoned.
    return place if hold(place) else _held_place(place)


@dataclass
class _Part:
    """One part of a process: its last heartbeat, and its last progress."""

    mark: tuple[int, int]
    beat: Beat
    heard: float
    moved: float


@dataclass(frozen=True)
class Stuck:
    """A part that made no progress for too long: `rank 1`, or empty for the process itself."""

    part: str
    doing: str
    seconds: float


@dataclass(frozen=True)
class Health:
    """The health route of a process, and the deadline of one answer."""

    url: str
    timeout_s: float = 30.0


class LivenessMonitor:
    """Heartbeats of one process, and the answers of its health route if it has one.

    A health route that generates a token for its answer tells a hung engine from a living one. `probe_period_s`:
    between a good answer of the health route and the next probe; it counts as silence."""

    def __init__(
        self, heartbeat: Path, health: Health | None = None, *, probe_period_s: float = PROBE_PERIOD_S
    ) -> None:
        self.prefix = heartbeat
        self._begin = awake_s()
        self._parts: dict[Path, _Part] = {}
        self._health = HealthProbe(health, probe_period_s) if health else None

    @property
    def was_well(self) -> bool:
        """Whether the health route ever answered well, of this process or one before it."""
        return self._health is not None and self._health.was_good

    @property
    def is_well(self) -> bool:
        """Whether its health route has answered well since `forget`."""
        return self._health is not None and self._health.has_answered

    def silent_s(self) -> float:
        """Return the silence of the most silent part; without parts, since `_FIRST_BEAT_S` after the start."""
        now = awake_s()
        self._listen(now)
        longest = max((now - part.heard for part in self._parts.values()), default=0.0)
        if self._health is not None:
            # A process that reports that it cannot answer now is not silent.
            if all(part.beat.answers for part in self._parts.values()):
                longest = max(longest, self._health.silent_s())
            else:
                self._health.excuse()
        return longest if self._parts else max(longest, now - self._begin - _FIRST_BEAT_S)

    def stuck(self) -> Stuck | None:
        """Return the part that made no progress for longest, if too long; to be called after `silent_s`."""
        now = awake_s()
        over = [
            Stuck(path.name.removeprefix(self.prefix.name).replace("_", " ").strip(), part.beat.doing, now - part.moved)
            for path, part in self._parts.items()
            if part.beat.bound_s is not None and now - part.moved > part.beat.bound_s
        ]
        return max(over, key=lambda one: one.seconds, default=None)

    def pids(self) -> list[int]:
        """Return the ids of the processes that send heartbeats."""
        return sorted({part.beat.pid for part in self._parts.values() if part.beat.pid})

    def _listen(self, now: float) -> None:
        there = set()
        for path in self.prefix.parent.glob(f"{self.prefix.name}*"):
            try:
                status = path.stat()
                mark = (status.st_mtime_ns, status.st_ino)
                known = self._parts.get(path)
                if known is None:
                    self._parts[path] = _Part(mark, read_beat(path), now, now)
                elif known.mark != mark:
                    beat = read_beat(path)
                    moved = known.moved if beat.moves == known.beat.moves else now
                    self._parts[path] = _Part(mark, beat, now, moved)
            except FileNotFoundError:
                continue
            there.add(path)
        for path in self._parts.keys() - there:
            self._parts[path].heard = self._parts[path].moved = now  # it has ended, or writes its file at this moment

    def end(self) -> None:
        """Probe no more."""
        if self._health:
            self._health.end()

    def forget(self, health: Health | None = None) -> None:
        """Start again, for a process that replaces another; `health`: the new process's route, if it differs."""
        for path in self.prefix.parent.glob(f"{self.prefix.name}*"):
            path.unlink(missing_ok=True)
        self._parts.clear()
        self._begin = awake_s()
        if self._health:
            self._health.forget(health)


class HealthProbe:
    """Probes a health route in a thread, and remembers the last good answer."""

    def __init__(self, health: Health, period_s: float) -> None:
        self._health = health
        self._period_s = period_s
        self._last_good: float | None = None
        self.was_good = False
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="health", daemon=True).start()

    def end(self) -> None:
        """Probe no more, after the current answer."""
        self._ended.set()

    def silent_s(self) -> float:
        """Return the seconds since the last good answer; 0 before the first."""
        return awake_s() - self._last_good if self._last_good is not None else 0.0

    @property
    def has_answered(self) -> bool:
        """Whether there was a good answer since `forget`."""
        return self._last_good is not None

    def excuse(self) -> None:
        """Count silence from now on."""
        if self._last_good is not None:
            self._last_good = awake_s()

    def forget(self, health: Health | None = None) -> None:
        """Wait for a first good answer again."""
        self._health = health or self._health
        self._last_good = None

    def _ask(self) -> None:
        while not self._ended.is_set():
            asked = awake_s()
            try:
                with open_directly(self._health.url, timeout_s=self._health.timeout_s):
                    self._last_good = asked  # which is what the answer proves
                    self.was_good = True
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                self._ended.wait(PERIOD_S)
            else:
                self._ended.wait(self._period_s)
