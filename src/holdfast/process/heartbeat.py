"""Heartbeats: show from outside that a process is frozen, or that its work is stuck.

The launcher names a file in the environment; a thread of the process writes it every second. Only a change of the
content counts, not its time, so clocks may jump. The thread lives on while the work is stuck, so a heartbeat also
counts the progress of the work (event loop, phase, micro-batch), and says what the process does and how long that may
take. `holdfast.launcher.liveness` reads the files. They are in memory: a full run directory makes no process look dead.

After `docker pause`, SIGSTOP of everything or a suspended job, all deadlines by `time.monotonic` have passed. `awake_s`
leaves out such freezes: a thread reads the clock each second, and only a very late read shows a freeze.
"""

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

_log = logging.getLogger("holdfast")

FROZEN_S = 5.0
"""A look at the clock so long after the one before means that the process was frozen between them."""
_TICK_S = 1.0


class _Clock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._awake_s = 0.0
        self._ticks = False

    def read(self) -> float:
        with self._lock:
            if not self._ticks:
                self._ticks = True
                threading.Thread(target=self._tick, name="clock", daemon=True).start()
                self._looked = time.monotonic()
            now = time.monotonic()
            passed = now - self._looked
            if 0 < passed < FROZEN_S:
                self._awake_s += passed
            self._looked = now
            return self._awake_s

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self.read()


_clock = _Clock()


def awake_s() -> float:
    """Return seconds for measuring spans of time, as `time.monotonic`, without the time in which we were frozen."""
    return _clock.read()


def _begin_anew() -> None:
    global _clock
    _clock = _Clock()  # a fork has no threads, and perhaps a lock that a thread held


os.register_at_fork(after_in_child=_begin_anew)


class BusyClock:
    """Counts the seconds in which at least one of several overlapping pieces of work is in progress. For one thread.
    `in_flight`: how many are in progress."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._busy_s = 0.0
        self._since = 0.0

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count a piece of work while the block runs."""
        if self.in_flight == 0:
            self._since = time.monotonic()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._busy_s += time.monotonic() - self._since

    @property
    def busy_s(self) -> float:
        """Seconds so far."""
        return self._busy_s + (time.monotonic() - self._since if self.in_flight else 0.0)


_SIGNAL = signal.SIGRTMIN + 3
_WAIT_S = 2.0
# Stacks are written piece by piece, the main thread's last; a busy machine interrupts that.
_QUIET_S = 0.5
_MOST_S = 10.0  # of all together
_LOOK_AGAIN_S = 0.02


def write_stacks_on_request() -> None:
    """From now on write to stderr what each thread does when `show_stacks` asks, also where none runs Python."""
    # Not signal.signal: a Python handler runs only when the main thread gets back to Python.
    faulthandler.register(_SIGNAL, file=2)


def show_stacks(pids: Iterable[int], *, of: int, log: Path) -> None:
    """Ask processes for their stacks; return when they are in the log, or soon: one may be unable to answer.

    One after the other: they write into one file, piece by piece.

    Args:
        pids: as they named themselves.
        of: their common ancestor, or a process of the list. A process that is not its child has another owner by now:
            left alone.
        log: where it lands.
    """
    import psutil  # takes 0.03 s, and few processes come here

    deadline = time.monotonic() + _MOST_S
    for pid in pids:
        size = file_size(log)
        try:
            process = psutil.Process(pid)
            is_child = of in (pid, *(parent.pid for parent in process.parents()))
            # A stopped process writes nothing: not worth the wait.
            if not is_child or process.status() == psutil.STATUS_STOPPED:
                continue
            process.send_signal(_SIGNAL)
        except psutil.Error:
            continue
        _wait_for_growth(log, size, deadline)


def _wait_for_growth(log: Path, size: int, deadline: float) -> None:
    last, changed = size, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (found := file_size(log)) != last:
            last, changed = found, now
        if now > changed + (_QUIET_S if last != size else _WAIT_S):
            return
        time.sleep(_LOOK_AGAIN_S)


def file_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone, or on a storage that is away."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


HEARTBEAT_ENV = "HOLDFAST_HEARTBEAT"
PERIOD_S = 1.0
HEALING_NAME = "healing"
"""Touched by the launcher while it waits for something, or starts something again."""
_BEAT_BYTES = 1024


class Beat(msgspec.Struct, frozen=True):
    """The content of a heartbeat.

    Attributes:
        moves: how often its work has shown progress, or a retry.
        work: units of progress.
        doing: its phase, in words.
        bound_s: stuck after so long without progress; None: it waits for others, which have bounds.
        answers: whether its health route answers now.
        pid: of the process that beats.
    """

    moves: int = 0
    work: int = 0
    doing: str = ""
    bound_s: float | None = None
    answers: bool = True
    pid: int = 0


class Heartbeat:
    """Beats for as long as this process lives, or until `end`. `path`: the file to write, if somebody asked for it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.beat = Beat()
        self.is_withheld: Callable[[], bool] = lambda: False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if path is not None:
            self._thread.start()

    def _beat(self) -> None:
        assert self.path is not None
        told = ""
        while not self._ended.is_set():
            failure = ""
            try:
                if not self.is_withheld():
                    self._write(self.path)
            except OSError as error:
                failure = str(error)
            if failure not in ("", told):
                _log.warning("heartbeats are not written whole: %s", failure)
            told = failure
            self._ended.wait(PERIOD_S)  # not sleep: `end` joins this thread

    def _write(self, path: Path) -> None:
        """Write over the beat before, which needs no room: others may fill the memory."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.encode(msgspec.structs.replace(self.beat, pid=os.getpid())).ljust(_BEAT_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.utime(descriptor)  # a heartbeat, even if not one byte fits
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Stop this process's heartbeat; other ranks may still run."""
        if self.path is not None:
            self._ended.set()
            self._thread.join()
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s stays: %s", self.path, error)


_own = Heartbeat(None)


def start_heartbeat(name: str = "") -> Heartbeat:
    """Beat, if the launcher asked for it, and write to stderr what every thread does when it asks. `name`:
    distinguishes processes that share one environment, such as ranks."""
    global _own
    prefix = os.environ.get(HEARTBEAT_ENV)
    if prefix:
        write_stacks_on_request()
    _own = Heartbeat(Path(f"{prefix}{name}") if prefix else None)
    return _own


def does(doing: str, *, bound_s: float | None = None, answers: bool = True) -> None:
    """Report the phase of this process, and after how long without `moved` it counts as stuck."""
    before = _own.beat
    # A new object, never changed in place: the beating thread encodes it without a lock.
    _own.beat = Beat(before.moves + 1, before.work + 1, doing, bound_s, answers)


def send_none_while(condition: Callable[[], bool]) -> None:
    """From now on send no heartbeat while `condition` holds, so that the launcher kills this process. `condition`:
    asked every second by a thread."""
    _own.is_withheld = condition


@contextmanager
def meanwhile(doing: str, *, bound_s: float) -> Iterator[None]:
    """Report another phase during the block, then the one before."""
    before = _own.beat
    does(doing, bound_s=bound_s)
    try:
        yield
    finally:
        does(before.doing, bound_s=before.bound_s, answers=before.answers)


def moved(*, works: bool = True, doing: str = "") -> None:
    """Report progress, and the phase `doing` if given; `works=False`: alive but idle."""
    before = _own.beat
    _own.beat = msgspec.structs.replace(
        before, moves=before.moves + 1, work=before.work + works, doing=doing or before.doing
    )


class Wait:
    """A wait for another process of the run; it lasts while any process makes progress or is being restarted.
    `timeout_s`: how long to wait while nobody makes progress."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since = self._looked = awake_s()
        self._seen = self._signs()

    def is_over(self) -> bool:
        """Whether it was in vain."""
        now = awake_s()
        if now - self._since <= self._timeout_s:
            return False
        # Beats come once a period: looking more often reads many files for nothing.
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
                signs[path.name] = path.stat().st_mtime_ns if path.name == HEALING_NAME else read_beat(path).work
            except FileNotFoundError:  # it has just ended
                continue
        return signs


def read_beat(path: Path) -> Beat:
    """Return what a process said of itself last."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Beat)
    except (msgspec.DecodeError, UnicodeDecodeError):  # empty or half written: the next read sees it whole
        return Beat()
