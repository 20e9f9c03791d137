"""Python's global generator, kept for those who are to draw from it.

Libraries that move files draw from it as well (botocore for the pauses between tries, aiohttp where it chooses a
connection), in threads of their own and as often as the network fails. In a process that trains it belongs to the run:
checkpoints hold its state, and a loss of the user's may draw from it.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

UPLOAD_THREAD = "upload"
# The second is where fsspec runs every filesystem that is asynchronous.
_THREADS = (UPLOAD_THREAD, "fsspecIO")
_METHODS = [name for name in random.__all__ if name.islower() and callable(getattr(random.Random, name, None))]
_apart = threading.local()


def keep_uploads_apart() -> None:
    """Let what draws from `random` in a thread of uploads draw from a generator of that thread."""
    if hasattr(random.random, "__wrapped__"):  # done already: wrapping twice would nest
        return
    taken = random.random
    for name in _METHODS:
        setattr(random, name, _divided(name, getattr(random, name)))
    botocore = sys.modules.get("botocore.retries.standard")
    if botocore is not None:  # some library imported it already, and it keeps the function as a default argument
        init = botocore.ExponentialBackoff.__init__
        init.__defaults__ = tuple(random.random if value == taken else value for value in init.__defaults__)


def _divided(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def draw(*arguments: Any, **options: Any) -> Any:
        # By name: the threads are made by libraries, after this.
        if threading.current_thread().name not in _THREADS:
            return real(*arguments, **options)
        if not hasattr(_apart, "generator"):
            _apart.generator = random.Random()
        return getattr(_apart.generator, name)(*arguments, **options)

    return draw
