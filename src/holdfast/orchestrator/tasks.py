"""Runs several coroutines so that the first failure, or a signal, stops the others; names the current phase.

`phase` serves heartbeats, and errors about engines or a trainer that miss a deadline.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from holdfast.errors import InferenceError
from holdfast.process.child import is_ignored
from holdfast.process.events import report
from holdfast.process.heartbeat import awake_s, moved

_T = TypeVar("_T")


class FreezeTolerantLoop(asyncio.SelectorEventLoop):
    """An event loop whose deadlines stand still while the process is frozen: nobody could have met them."""

    def time(self) -> float:
        return awake_s()


async def run_all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order of `work`; the first failure cancels the others and is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    else:
        return [task.result() for task in tasks]
    # Outside of `except`: else the traceback would show the group, too.
    raise first


async def race(*works: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    """Wait until one of `works` is done, and cancel the others; return which are done."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_unless(work: Coroutine[Any, Any, None], event: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when `event` has come. Raise the error of either."""
    for done in await race(work, event):
        done.result()


class SessionSlots:
    """Limits the number of sessions; admits whole groups, in the order in which they came."""

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def taking(self, size: int) -> AsyncIterator[None]:
        """Hold room for a group of `size` sessions, at most `most`."""
        taken = 0
        try:
            # One group at a time takes slots: else two groups could wait for each other.
            async with self._turn:
                while taken < size:
                    await self._slots.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._slots.release()


class FirstFailure:
    """The first failure of something that work depends on; it ends the work, even if the work catches it."""

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()

    def set(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self._has_failed.set()

    def __bool__(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`; at a failure, cancel `work` and raise the failure."""
        done = await race(work, self._has_failed.wait())
        self.check()
        [working] = done
        return working.result()


async def run_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; SIGTERM and SIGINT cancel it and count as a clean end."""
    working = asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        working.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        if number == signal.SIGTERM or not is_ignored(number):  # the launcher's way to end us is never ignored
            asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await working
    except asyncio.CancelledError:
        if not stopped:
            raise
        report("stopped")


@contextmanager
def phase(name: str, *, version: int | None = None) -> Iterator[None]:
    """Name the phase in heartbeats, and with the policy version in each `InferenceError`."""
    moved(doing=name)
    try:
        yield
    except InferenceError as error:
        at = "" if version is None else f", policy version {version}"
        error.args = (f"{name}{at}: {error}",)
        raise
