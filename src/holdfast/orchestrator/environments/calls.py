"""Calls into environments: what they raise, and what takes too long, is reported with its environment, task and place.

Environments are other people's code. Whatever they raise, `sys.exit` included, becomes one `EnvironmentFailure`.
The time in which a call waits for the engine is not the environment's: it counts neither for `timeout_s` nor as
silence.
"""

from __future__ import annotations

import asyncio
import inspect
import site
import sysconfig
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.orchestrator.environments.contract import PromptTooLong
from holdfast.orchestrator.environments.judge import JudgeFailure
from holdfast.shared.errors import EnvironmentFailure
from holdfast.shared.printable import printable
from holdfast.shared.process.clock import awake_s

_MOST_FRAMES = 30
_LIBRARIES = tuple(
    {*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
)
_OURS = str(Path(__file__).parents[1])


class CallTimeout(EnvironmentFailure):
    """A call took longer than it may."""


class Call:
    """One call of a method of an environment, while it goes on.

    Args:
        what: names environment and task, for failures.
        name: the same without a judgement.
        environment: its name.
        method: that is called.
        timeout_s: how long it may take, the engine's time apart; None: as long as it likes.
        deadline: what ends it then.
    """

    def __init__(
        self, what: str, *, name: str, environment: str, method: str, timeout_s: float | None, deadline: asyncio.Timeout
    ) -> None:
        self.what = what
        self.name = name
        self.environment = environment
        self.method = method
        self.timeout_s = timeout_s
        self.task = asyncio.current_task()
        self._deadline = deadline
        self._num_sampling = 0
        self._own_s = 0.0
        self._since = awake_s()

    @property
    def silent_s(self) -> float:
        """Seconds since it last heard from the engine, or began; 0 while the engine works."""
        return 0.0 if self._num_sampling else awake_s() - self._since

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """While the engine samples for it, its clock stands still."""
        if self._num_sampling == 0:
            self._own_s += awake_s() - self._since
            self._move_deadline(None)
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if self._num_sampling == 0:
                self._since = awake_s()
                if self.timeout_s is not None:
                    loop = asyncio.get_running_loop()
                    self._move_deadline(loop.time() + max(0.0, self.timeout_s - self._own_s))

    def _move_deadline(self, when: float | None) -> None:
        if self in RUNNING and not self._deadline.expired():
            self._deadline.reschedule(when)


RUNNING: set[Call] = set()
"""The calls of this process that go on now."""
_CURRENT: ContextVar[Call] = ContextVar("environment call")


@contextmanager
def sampling() -> Iterator[None]:
    """Stop the clock of the call that this is in, if any, while the engine, or a judge, works for it."""
    call = _CURRENT.get(None)
    if call is None:
        yield
        return
    with call.sampling():
        yield


@asynccontextmanager
async def calling(
    what: str, *, name: str, environment: str, method: str, timeout_s: float | None
) -> AsyncIterator[None]:
    """Turn what an environment raises, or takes too long for, into a failure that says where it came from.

    Raises:
        EnvironmentFailure: it raised, or ended itself; `CallTimeout`: it took too long.
    """
    deadline = asyncio.timeout(timeout_s)
    call = Call(what, name=name, environment=environment, method=method, timeout_s=timeout_s, deadline=deadline)
    token = _CURRENT.set(call)
    try:
        async with deadline:
            RUNNING.add(call)
            try:
                yield
            finally:
                RUNNING.discard(call)
    except JudgeFailure as failure:
        raise JudgeFailure(f"{what}: {failure}", reason=failure.reason) from None
    except (EnvironmentFailure, PromptTooLong, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            raise CallTimeout(f"{what}: {method}() took longer than {timeout_s:g} s (timeout_s)") from None
        if isinstance(error, asyncio.CancelledError) and call.task is not None and call.task.cancelling():
            raise  # the run ends, or another group has failed
        raise EnvironmentFailure(
            f"{what}: {method}() raised {type(error).__name__}: {printable(error)} ({place_of(error)})"
        ) from error
    finally:
        _CURRENT.reset(token)


async def result_of(value: Any) -> Any:
    """Return what a method of an environment returned, awaited if it is `async`."""
    return await value if inspect.isawaitable(value) else value


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, its text cut: it may be as long as what the environment was working on."""
    places = "".join(traceback.format_tb(error.__traceback__, limit=-_MOST_FRAMES))
    return f"{places}{type(error).__name__}: {printable(error)}"


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of the user's own code that an error came through."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _users(frames)


def place_of_task(task: asyncio.Task[object] | None) -> str:
    """Return `file:line` of where the user's code waits in a suspended task."""
    waiting = task.get_coro() if task is not None else None
    frames: list[tuple[str, int]] = []
    while waiting is not None:
        frame = next((found for name in _FRAMES if (found := getattr(waiting, name, None)) is not None), None)
        if frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        waiting = next((found for name in _AWAITED if (found := getattr(waiting, name, None)) is not None), None)
    return _users(frames)


_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITED = ("cr_await", "ag_await", "gi_yieldfrom")


def place_of_frame(frame: FrameType | None) -> str:
    """Return `file:line` of where the user's code is, from the innermost frame of its thread."""
    frames: list[tuple[str, int]] = []
    while frame is not None:
        frames.insert(0, (frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _users(frames)


def _users(frames: list[tuple[str, int]]) -> str:
    """Choose the innermost frame that is neither a library's nor ours; the innermost of all if there is none."""
    if not frames:
        return "an unknown place"
    own = [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, _OURS, "<"))]
    filename, line = (own or frames)[-1]
    return f"{filename}:{line}"
