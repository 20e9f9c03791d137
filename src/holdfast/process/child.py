"""Start and end of every child process: logging, threads, death with its parent, exit codes, limits on open files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from holdfast.errors import GO_ON_OR_BEGIN_AGAIN, STORAGE_FAILED, ConfigError, HoldfastError, is_storage_failure

if TYPE_CHECKING:
    import subprocess

LAUNCHER_ENV = "HOLDFAST_LAUNCHER_PID"
DATE_ENV = "HOLDFAST_TEMPLATE_DATE"
_SIGNALS_S = 0.1
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def die_with_launcher() -> None:
    """Die with the launcher that started this process; one started by hand may outlive its shell."""
    # Popped: children of this process have another parent.
    launcher = os.environ.pop(LAUNCHER_ENV, None)
    if launcher is not None:
        die_with_parent(parent=int(launcher))


def die_with_parent(sig: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask the kernel (Linux) for `sig` when the parent ends, so that no orphan outlives a killed run."""
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)
    # It ended before the call above, so its signal will never come.
    if os.getppid() != parent:
        # Without clean-up: a fork would flush and close what belongs to its parent.
        os._exit(1)


_END_S = 30.0
"""For a process that has closed its connection."""
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def killed_by(return_code: int | None) -> signal.Signals | None:
    """Return the signal if a process that ended with `return_code` (of `Popen`) was ended from outside, else None.
    People, schedulers and the kernel's OOM killer send these signals; crashes have others."""
    return signal.Signals(-return_code) if return_code is not None and -return_code in _FROM_OUTSIDE else None


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process that has closed its connection was killed from outside."""
    import subprocess  # its caller has

    with contextlib.suppress(subprocess.TimeoutExpired):
        return killed_by(process.wait(_END_S)) is not None
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by a signal."""
    import psutil  # takes 0.03 s, and few processes come here

    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def keep_date(unix_s: int | None) -> None:
    """Let chat templates write this date from now on, here and in the processes that this process starts. A run keeps
    the date of its first start: otherwise its prompts would change at midnight."""
    if unix_s is not None:
        os.environ[DATE_ENV] = str(unix_s)


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def set_thread_environment(threads: int) -> None:
    """Bound the OpenMP and BLAS teams of this process; call before torch or numpy is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def wait_passively() -> None:
    """Have the threads of libraries sleep while they wait, in processes that start from now on: threads that spin would
    make a step of `rl` take three times as long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # the same for Intel's and LLVM's OpenMP


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Import large libraries without looking for garbage meanwhile, nor among what they made ever after. They make a
    million objects that stay. The collector would walk over all of them a dozen times, a fifth of the time of importing
    torch or vLLM, and again in the middle of some steps."""
    gc.disable()
    try:
        yield
    finally:
        # Before it is enabled again: then it never walks over these objects.
        gc.freeze()
        gc.enable()


def is_ignored(number: signal.Signals) -> bool:
    """Whether a parent had this process ignore the signal, as `nohup` does: then it stays ignored."""
    return signal.getsignal(number) is signal.SIG_IGN


class NotedSignals:
    """Notes signals that ask for the end, in place of their effect; a context manager. `came`: their numbers. Signals
    that this process ignores stay ignored."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = [number for number in numbers if not is_ignored(number)]
        self.came: list[int] = []

    def __enter__(self) -> Self:
        self._before = {one: signal.signal(one, lambda number, _: self.came.append(number)) for one in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def wait(self, seconds: float) -> None:
        """Wait; a signal ends the wait. Python continues a sleep after a handler, so the sleeps are short."""
        until = time.monotonic() + seconds
        while not self.came and (left := until - time.monotonic()) > 0:
            time.sleep(min(_SIGNALS_S, left))


class _LossyFile(io.FileIO):
    """Drops output that a full disk, a closed pipe or a terminal without room cannot take."""

    def write(self, data: Any, /) -> int:
        try:
            written: int | None = super().write(data)
        except OSError as error:
            if not is_storage_failure(error) and not isinstance(error, BrokenPipeError):
                raise
            written = None
        # None, too: another program left the terminal in a mode in which nothing waits for room.
        # As if written: a short count would have the buffer keep it and try again for ever.
        return memoryview(data).nbytes if written is None else written


class _NamedOutput(io.FileIO):
    """Names itself in its errors, which must not look like errors of a file of the run."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = OUTPUT
            raise


OUTPUT = "<output>"
"""`filename` of an error of stdout after `name_output`."""


def name_output() -> None:
    """Let errors of stdout have the file name `OUTPUT`, and characters that its encoding lacks be escaped."""
    _replace_stream("stdout", _NamedOutput)


def make_output_lossy(*names: str) -> None:
    """Let stdout and stderr drop what their disk cannot take, and what nobody reads any more (`| tee log` that died).

    No process ends, or changes its exit code, by that. `names`: `stdout` or `stderr`; unset: both."""
    for name in names or ("stdout", "stderr"):
        _replace_stream(name, _LossyFile, line_buffering=True)


def _replace_stream(name: str, kind: type[io.FileIO], *, line_buffering: bool = False) -> None:
    stream = getattr(sys, name)
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # PYTHONUNBUFFERED leaves the buffer out
    if not isinstance(raw, io.FileIO) or isinstance(raw, kind):
        return
    # closefd=False: the descriptor belongs to the stream that is replaced.
    writer = io.BufferedWriter(kind(raw.fileno(), "w", closefd=False))
    with contextlib.suppress(OSError):  # the buffer may hold what cannot be written
        stream.flush()
    by_line = line_buffering or stream.line_buffering or stream.write_through
    setattr(sys, name, io.TextIOWrapper(writer, stream.encoding, "backslashreplace", line_buffering=by_line))


class _LogFormatter(logging.Formatter):
    """Writes the level before the message, except if the message begins with the level, as phases of `report` may."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if not record.message.startswith(record.levelname):
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


def set_up_logging(name: str) -> None:
    """Send log records of this process to stderr, which the launcher points at its log file."""
    make_output_lossy()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter(f"%(asctime)s {name} %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_reporting_errors(program: Callable[[], object]) -> NoReturn:
    """Run `program` and exit, as `exit_code_of` says."""

    def run() -> int:
        program()
        return 0

    sys.exit(exit_code_of(run))


def exit_code_of(program: Callable[[], int]) -> int:
    """Run `program`; return its exit code. Report its error, and return the error's exit code."""
    try:
        return program()
    except Exception as error:  # noqa: BLE001 - reported, and the process ends
        return report_error(error)


def report_error(error: Exception) -> int:
    """Say on stderr what went wrong, and return the exit code. A `HoldfastError` prints its message; a storage failure
    returns `STORAGE_FAILED`; anything else prints its traceback and returns 1."""
    if isinstance(error, HoldfastError):
        message, code = str(error), STORAGE_FAILED if is_storage_failure(error) else error.exit_code
    elif not is_storage_failure(error):
        # A bug of ours: the traceback is what the report needs, once, without a launcher's wrapping.
        traceback.print_exception(error)
        return 1
    else:
        where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
        reason = error.strerror if isinstance(error, OSError) else error
        message = (
            f"the storage failed{where}: {reason}. What was committed is whole. "
            f"Make room or repair the storage, then {GO_ON_OR_BEGIN_AGAIN}."
        )
        code = STORAGE_FAILED
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


# Logs, the journal, libraries, and what environments open for themselves.
_OTHERS = 128
_OF_A_SERVER = 65_536


def allow_connections(number: int, *, key: str) -> None:
    """Raise the soft limit of open files so far that `number` connections fit beside everything else. `key`: dotted key
    of the setting that decides how many there are, for errors. Raise ConfigError if the hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"{number} connections at once ({key}) need {wanted} open files, and this process may have {hard} "
            f"(ulimit -Hn). Lower {key} to {max(1, hard - _OTHERS)} or raise the limit."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allow_many_connections() -> None:
    """Raise the soft limit of open files as far as a server may need it, which does not know how many clients come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OF_A_SERVER if hard == resource.RLIM_INFINITY else min(hard, _OF_A_SERVER)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
