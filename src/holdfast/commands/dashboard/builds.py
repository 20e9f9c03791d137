"""Having the page made: when somebody asks and the run's files have changed, by one process at a time.

The process dies with the launcher, has the lowest priority, and hands the page over in a pipe: nothing lies on a disk.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from holdfast.commands.dashboard.built import PROCESS, Built
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.child import LAUNCHER_ENV
from holdfast.shared.process.import_path import module_command

_SHARE = 0.1
"""Of the time of a core, at most, as long as somebody looks."""
_PAUSE_S = 5.0
_LIMIT_S = 600.0
_DYING_S = 5.0
_FIRST_COUNTED_S = 10.0
"""Of a try that failed, at most: what was wrong may be over soon. Of each that fails behind it, twice as much."""
_LONGEST_REASON = 500


class Builds:
    """Makes the pages of one run, in a thread; a context manager.

    Attributes:
        built: the newest page; None before the first.
        trouble: why there is none that is newer, although there should be; None where all is well.

    Args:
        tell: takes what is to be said in the console.
        pause_s: between two pages, at least.
        clock: gives seconds, of no matter which time.
    """

    def __init__(
        self,
        run_dir: RunDir,
        tell: Callable[[str], None],
        *,
        pause_s: float = _PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.built: Built | None = None
        self.trouble: str | None = None
        self._run_dir = run_dir
        self._tell = tell
        self._pause_s = pause_s
        self._clock = clock
        self._most_counted_s = _FIRST_COUNTED_S
        self._asked, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of what is started and what is ended
        self._process: subprocess.Popen[bytes] | None = None
        self._files: object = None
        # It stays until the end: the kernel ends a process also when the thread is over that has started it.
        self._thread = threading.Thread(target=self._work, name="dashboard-builds", daemon=True)

    def __enter__(self) -> Builds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended.set()
            if self._process is not None:
                self._process.kill()
        self._asked.set()
        self._thread.join(_DYING_S)

    def ask(self) -> None:
        """Have a page made, if there is something new to show."""
        self._asked.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            self._asked.wait()
            self._asked.clear()
            begin = self._clock()
            try:
                cost_s = self._make_if_new()
                self._most_counted_s = _FIRST_COUNTED_S
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on; said where one looks
                # Nobody knows how much of a core it was.
                cost_s = min(self._clock() - begin, self._most_counted_s)
                self._most_counted_s *= 2
                if not self._ended.is_set():
                    trouble = str(error) or type(error).__name__
                    self._tell(f"the page is not made: {trouble}. Training goes on")
                    self.trouble = trouble
            if cost_s:
                self._ended.wait(max(self._pause_s, cost_s * (1 / _SHARE - 1)))

    def _make_if_new(self) -> float:
        """Make the page, unless the newest shows all that is there; return what it took of a core, in seconds."""
        files = tuple(_states(self._run_dir))
        if self.trouble is None and self.built is not None and files == self._files:
            return 0.0
        self.built = self._build()
        self.trouble, self._files = None, files
        return self.built.cpu_s

    def _build(self) -> Built:
        argv = module_command(PROCESS, str(self._run_dir.path))
        with self._lock:
            if self._ended.is_set():
                raise InterruptedError("the launcher ends")
            process = self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, LAUNCHER_ENV: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )
        try:
            output, errors = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.trouble = f"its process has not come to an end for {_LIMIT_S:g} s"
            process.kill()
            process.communicate()  # where a storage holds it, no other one waits there as well
            raise TimeoutError(self.trouble) from None
        finally:
            with self._lock:
                self._process = None
        if process.returncode != 0:
            raise RuntimeError(_reason(errors.decode(errors="replace"), process.returncode))
        return msgspec.msgpack.decode(output, type=Built)


def _reason(errors: str, code: int) -> str:
    """Return what a process said at its end: its `error:`, or the last line of what else it wrote."""
    _, mark, told = f"\n{errors.strip()}".rpartition("\nerror: ")
    told = told if mark else told.rpartition("\n")[2]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return told[:_LONGEST_REASON] or f"its process {how}"


def _states(run_dir: RunDir) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of what a page is made of: of a directory, when something came or went."""
    logs = run_dir.path / "logs"
    there = [run_dir.metrics, run_dir.checkpoints, run_dir.rollouts, run_dir.path / "configs", run_dir.evaluations]
    there += run_dir.evaluations.glob("step_*")
    there += [*logs.glob("attempt_*/events*.jsonl"), *logs.glob("attempt_*/timeline_*.jsonl")]
    for path in sorted(there):
        try:
            status = path.stat()
        except OSError:  # it is not there yet, or no more; what cannot be read, the page says
            continue
        yield str(path), status.st_size, status.st_mtime_ns
