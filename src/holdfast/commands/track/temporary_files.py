"""Where the libraries of trackers have their temporary files: W&B leaves two directories behind when it is killed."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.commands.track.trackers import BUILT_IN
from holdfast.shared.process.scratch import SHORT_HOME, drop, make_scratch, scratch_name

_log = logging.getLogger("holdfast")
# Of a Unix socket's path, with what W&B puts behind the directory, and eight random characters in its name.
_MOST_BYTES_OF_HOME = 107 - 48 - 8


@contextmanager
def temporary_files_of(tracker: str) -> Iterator[None]:
    """Have a tracker's library put its temporary files into a directory that goes with this process, however it ends.

    Not for trackers of users, who may keep something there.
    """
    scratch = _scratch() if tracker in BUILT_IN else None
    if scratch is None:
        yield
        return
    atexit.register(drop, scratch)  # behind what the libraries do at the end: they are imported later
    before = os.environ.get("TMPDIR")
    _put_into(str(scratch))
    try:
        yield
    finally:
        _put_into(before)


def _scratch() -> Path | None:
    try:
        home = Path(tempfile.gettempdir())
        return make_scratch(home if len(os.fsencode(home / scratch_name())) <= _MOST_BYTES_OF_HOME else SHORT_HOME)
    except OSError as error:  # the library may need none
        _log.warning("there is no directory for temporary files: %s", error)
        return None


def _put_into(directory: str | None) -> None:
    if directory is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = directory
    tempfile.tempdir = None  # so that it looks again
