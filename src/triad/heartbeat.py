"""Heartbeats: a process that is stopped, or comes no further in its work, is noticed from outside.

The launcher names a file in the environment; a thread of the process writes it anew every second. What counts is that
it changes, not when, so clocks may jump. That thread lives on while the work itself is stuck, so the beat also says how
often the work has moved on (an event loop that turns, a phase of a step, a micro-batch), what is being done, and
for how long that may stand still. Times in which the launcher itself was frozen do not count: whoever froze it may have
frozen all, and nobody could be heard.

The files lie in memory, so that a run directory that cannot be written makes nobody look dead.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
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

import msgspec

from triad.clock import awake_s

# Proxies of the environment are for the internet, not for the server of a run.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_log = logging.getLogger("triad")

HEARTBEAT_ENV = "TRIAD_HEARTBEAT"
PERIOD_S = 1.0
PROBE_PERIOD_S = 5.0
HEALING_NAME = "healing"
"""Touched by the launcher while it waits for something, or starts something again."""
# A process imports before its first beat, for seconds on a busy machine.
_FIRST_BEAT_S = 30.0
_MEMORY = Path("/dev/shm")
_BEAT_BYTES = 1024


class Beat(msgspec.Struct, frozen=True):
    """What a process says of itself.

    Attributes:
        moves: how often its work has moved on, be it in vain: it is not stuck.
        work: how often it got something done, or heard that somebody is at it.
        doing: in words.
        bound_s: it is stuck when it has not moved for so long; None: it waits for others, which have bounds.
        answers: its health route may be asked; False: what it does stops that for a while.
    """

    moves: int = 0
    work: int = 0
    doing: str = ""
    bound_s: float | None = None
    answers: bool = True


class Heartbeat:
    """Beats for as long as this process lives, or until `end`.

    Args:
        path: the file to write; None: nobody asked for beats.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.beat = Beat()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if path is not None:
            self._thread.start()

    def _beat(self) -> None:
        assert self.path is not None
        while not self._ended.is_set():
            try:
                self._write(self.path)
            except OSError as error:
                _log.warning("no heartbeat: %s", error)
            self._ended.wait(PERIOD_S)

    def _write(self, path: Path) -> None:
        """Write over the beat before, which needs no room: others may fill the memory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.encode(self.beat).ljust(_BEAT_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.utime(descriptor)  # a sign of life, even where not one byte fits
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Be no part of what is watched any more: the others may live on for a while."""
        if self.path is not None:
            self._ended.set()
            self._thread.join()
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s stays: %s", self.path, error)


_own = Heartbeat(None)


def start_heartbeat(name: str = "") -> Heartbeat:
    """Beat, if the launcher asked for it.

    Args:
        name: distinguishes processes that share one environment, such as ranks.
    """
    global _own
    prefix = os.environ.get(HEARTBEAT_ENV)
    _own = Heartbeat(Path(f"{prefix}{name}") if prefix else None)
    return _own


def does(doing: str, *, bound_s: float | None = None, answers: bool = True) -> None:
    """Say what this process does from now on, and after how long without `moved` it is stuck in that."""
    before = _own.beat
    _own.beat = Beat(before.moves + 1, before.work + 1, doing, bound_s, answers)


def moved(*, works: bool = True, doing: str = "") -> None:
    """Say that the work has moved on, to `doing` if that is given; without `works`, that it could have."""
    before = _own.beat
    _own.beat = msgspec.structs.replace(
        before, moves=before.moves + 1, work=before.work + works, doing=doing or before.doing
    )


class Wait:
    """A wait for what another process of the run makes; not over while anybody gets anything done or is being healed.

    Args:
        timeout_s: how long it goes on where nothing else happens.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since = self._looked = awake_s()
        self._seen = self._signs()

    def is_over(self) -> bool:
        """Whether it was in vain."""
        now = awake_s()
        if now - self._since <= self._timeout_s:
            return False
        if now - self._looked > PERIOD_S / 2:
            self._looked = now
            seen = self._signs()
            if seen != self._seen:
                self._seen, self._since = seen, now
                return False
        return now - self._since > self._timeout_s

    def _signs(self) -> dict[str, object]:
        """Return what changes when somebody else gets something done; empty where no launcher watches."""
        prefix = os.environ.get(HEARTBEAT_ENV)
        if not prefix:
            return {}
        folder, own = Path(prefix).parent, Path(prefix).name
        signs: dict[str, object] = {}
        for path in folder.glob("*"):
            if path.name.startswith((own, ".")):
                continue
            try:
                signs[path.name] = path.stat().st_mtime_ns if path.name == HEALING_NAME else _read(path).work
            except FileNotFoundError:  # it has just ended
                continue
        return signs


def _read(path: Path) -> Beat:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Beat)
    except msgspec.DecodeError:  # empty, or half of it is of the beat before: the next look sees it whole
        return Beat()


@contextmanager
def place_of_beats(run_dir: Path) -> Iterator[Path]:
    """Make a directory for the beats of the run in `run_dir`, in memory where there is a place; remove it at the end.

    What a launcher that was killed left is taken over by the next one, which holds the lock of the run.
    """
    home = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    status = run_dir.stat()  # containers may share the memory, and have directories of the same name
    digest = hashlib.sha256(f"{status.st_dev} {status.st_ino} {run_dir}".encode()).hexdigest()[:16]
    place = home / f"triad-{os.getuid()}-{digest}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        place = Path(tempfile.mkdtemp(prefix="triad-"))
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        place = Path(tempfile.mkdtemp(prefix="triad-"))  # somebody else made it
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@dataclass
class _Part:
    """What is known of one part of a process: when it beat last, and moved on last."""

    mark: tuple[int, int]
    beat: Beat
    heard: float
    moved: float


@dataclass(frozen=True)
class Stuck:
    """A part that has come no further for longer than it may.

    Attributes:
        part: such as `rank 1`; empty for the process itself.
    """

    part: str
    doing: str
    seconds: float


@dataclass(frozen=True)
class Health:
    """Where a process answers whether it is well.

    Attributes:
        url: of the route.
        timeout_s: for how long one answer is waited for.
    """

    url: str
    timeout_s: float = 30.0


class Vitals:
    """Signs of life of one process: its heartbeats, and the answers of its health route where it has one.

    A health route that generates a token for its answer tells a hung engine from a living one.

    Args:
        probe_period_s: between a good answer of the health route and the next question. It counts as
            silence, so it must be well below what is taken for death.
    """

    def __init__(
        self, heartbeat: Path, health: Health | None = None, *, probe_period_s: float = PROBE_PERIOD_S
    ) -> None:
        self.prefix = heartbeat
        self._begin = awake_s()
        self._parts: dict[Path, _Part] = {}
        self._health = HealthProbe(health, probe_period_s) if health else None

    @property
    def was_well(self) -> bool:
        """Whether its health route ever answered well, of this process or one before it."""
        return self._health is not None and self._health.was_good

    @property
    def is_well(self) -> bool:
        """Whether its health route has answered well since `forget`."""
        return self._health is not None and self._health.has_answered

    def silent_s(self) -> float:
        """Return for how long the most silent of the parts that ever gave a sign has been silent.

        Where none ever did, the silence counts from `_FIRST_BEAT_S` after the start.
        """
        now = awake_s()
        self._listen(now)
        longest = max((now - part.heard for part in self._parts.values()), default=0.0)
        if self._health is not None:
            if all(part.beat.answers for part in self._parts.values()):
                longest = max(longest, self._health.silent_s())
            else:
                self._health.excuse()
        return longest if self._parts else max(longest, now - self._begin - _FIRST_BEAT_S)

    def stuck(self) -> Stuck | None:
        """Return the part that has not moved for longest, if that is longer than it may; `silent_s` comes first."""
        now = awake_s()
        over = [
            Stuck(path.name.removeprefix(self.prefix.name).replace("_", " ").strip(), part.beat.doing, now - part.moved)
            for path, part in self._parts.items()
            if part.beat.bound_s is not None and now - part.moved > part.beat.bound_s
        ]
        return max(over, key=lambda one: one.seconds, default=None)

    def _listen(self, now: float) -> None:
        there = set()
        for path in self.prefix.parent.glob(f"{self.prefix.name}*"):
            try:
                status = path.stat()
                mark = (status.st_mtime_ns, status.st_ino)
                known = self._parts.get(path)
                if known is None:
                    self._parts[path] = _Part(mark, _read(path), now, now)
                elif known.mark != mark:
                    beat = _read(path)
                    moved = known.moved if beat.moves == known.beat.moves else now
                    self._parts[path] = _Part(mark, beat, now, moved)
            except FileNotFoundError:  # this part has just ended
                continue
            there.add(path)
        for path in self._parts.keys() - there:
            self._parts[path].heard = self._parts[path].moved = now  # it has ended, or is about to beat again

    def end(self) -> None:
        """Ask no more."""
        if self._health:
            self._health.end()

    def forget(self) -> None:
        """Start again, for a process that takes the place of another."""
        for path in self.prefix.parent.glob(f"{self.prefix.name}*"):
            path.unlink(missing_ok=True)
        self._parts.clear()
        self._begin = awake_s()
        if self._health:
            self._health.forget()


class HealthProbe:
    """Asks a health route again and again, in a thread, and remembers when it last answered well."""

    def __init__(self, health: Health, period_s: float) -> None:
        self._health = health
        self._period_s = period_s
        self._last_good: float | None = None
        self.was_good = False
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="health", daemon=True).start()

    def end(self) -> None:
        """Ask no more; an answer that is being waited for is waited for."""
        self._ended.set()

    def silent_s(self) -> float:
        """Return the seconds since the last good answer; 0 before the first."""
        return awake_s() - self._last_good if self._last_good is not None else 0.0

    @property
    def has_answered(self) -> bool:
        """Whether there was a good answer since `forget`."""
        return self._last_good is not None

    def excuse(self) -> None:
        """Count silence from now on: until now there was a reason for it."""
        if self._last_good is not None:
            self._last_good = awake_s()

    def forget(self) -> None:
        """Wait for a first good answer again."""
        self._last_good = None

    def _ask(self) -> None:
        while not self._ended.is_set():
            asked = awake_s()
            try:
                with _opener.open(self._health.url, timeout=self._health.timeout_s):
                    self._last_good = asked
                    self.was_good = True
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                self._ended.wait(PERIOD_S)  # nobody there, or not well: its silence is what counts
            else:
                self._ended.wait(self._period_s)
