"""On PYTHONPATH of a chaos run: as many files of the run directory as $CHAOS_READ_ERRORS holds fail with EIO when a
process opens them to read.
"""

import builtins
import errno
import functools
import io
import os
import pathlib

_TOKENS, _RUN = os.environ.get("CHAOS_READ_ERRORS"), os.environ.get("CHAOS_RUN_DIR")


def _take_one() -> bool:
    for token in pathlib.Path(_TOKENS or "").iterdir():
        try:
            token.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        return True
    return False


def _is_of_run(path: object) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(f"{_RUN}/")


def _watched(real, is_reading):
    @functools.wraps(real)
    def opened(path, *arguments, **options):
        if _is_of_run(path) and is_reading(*arguments, **options) and _take_one():
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fsdecode(path))
        return real(path, *arguments, **options)

    return opened


def _reads(mode="r", *_arguments, **_options) -> bool:
    return not set(mode) & set("wax+")


def _reads_raw(flags, *_arguments, **_options) -> bool:
    return not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY)


if _TOKENS and _RUN:
    builtins.open = io.open = _watched(io.open, _reads)
    os.open = _watched(os.open, _reads_raw)
