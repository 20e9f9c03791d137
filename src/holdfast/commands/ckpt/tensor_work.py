"""The part of `ckpt` that needs torch: its errors and its output, around calls of `holdfast.trainer.conversion`.

That package is imported where it is called, so that whatever does without torch starts without its seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from holdfast.commands.tables import working
from holdfast.shared.process.child import report_error


class TensorWorkFailed(Exception):
    """Reading or writing tensors failed, which has been said; the command ends with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@contextlib.contextmanager
def tensor_work(what: str) -> Iterator[None]:
    """Show on a terminal that `what` takes its time, and keep stdout for the report.

    Raises:
        TensorWorkFailed: the block raised, which is reported as in the processes of a run: storage that failed as such.
    """
    try:
        with working(what), _stdout_on_stderr():
            yield
    except Exception as error:
        raise TensorWorkFailed(report_error(error)) from error


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send to stderr what libraries print, whatever language they are written in: `--json` is read by scripts."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed may still lie in their buffer
        os.dup2(stdout, 1)
        os.close(stdout)
