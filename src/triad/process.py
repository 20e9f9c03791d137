"""What every child process does at its start and its end: logging, threads, dying with its parent."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from triad.errors import TriadError

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}
LAUNCHER_ENV = "TRIAD_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Die with the launcher that started this process; one started by hand may outlive its shell.

    The launcher gives its process id, so a launcher that died before this call is noticed as well.
    """
    launcher = os.environ.pop(LAUNCHER_ENV, None)
    if launcher is not None:
        die_with_parent(parent=int(launcher))


def die_with_parent(sig: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask the kernel (Linux) for `sig` when the parent ends, so that no orphan outlives a killed run."""
    if not sys.platform.startswith("linux"):
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os._exit(1)


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_thread_environment(threads: int) -> None:
    """Bound the OpenMP and BLAS teams of this process; call before torch or numpy is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_up_logging(name: str) -> None:
    """Send log records of this process to stderr, which the launcher points at its log file."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_reporting_errors(program: Callable[[], object]) -> NoReturn:
    """Run `program` and exit: 0, a `TriadError`'s code after its message alone, or 1 after a traceback."""
    try:
        program()
    except TriadError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            traceback.print_exc()
            sys.exit(1)
        where = f" at {error.filename}" if error.filename else ""
        print(
            f"error: the storage failed{where}: {error.strerror}. What was committed is whole. "
            "Make room or mend it, then go on with --ckpt.resume-step latest.",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(TriadError.exit_code)
    except Exception:  # noqa: BLE001 - reported, and the process ends
        # A bug of ours: the traceback is what the report needs, once, without a launcher's wrapping.
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)
