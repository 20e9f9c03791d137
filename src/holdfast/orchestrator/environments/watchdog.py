"""Names the calls of environments that nothing has been heard of for a while, waiting or blocking.

A thread looks every second. A call that awaits something else than the engine is named after `silent_s` seconds, and
again whenever its silence has doubled. A call that blocks the event loop stops everybody's work, cannot be cancelled
from outside, and hides from every deadline of asyncio: it is named in the same way, and when its `timeout_s` is over
the process ends, to be started again. The event loop beats for the launcher, which ends what else blocks it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

from holdfast.orchestrator.environments.calls import RUNNING, Call, place_of_frame, place_of_task
from holdfast.shared.errors import STUCK, EnvironmentFailure
from holdfast.shared.process.clock import awake_s
from holdfast.shared.process.events import report
from holdfast.shared.process.heartbeat import does, moved

SILENT_S = 30.0
_MOST_PERIOD_S = 1.0
_BENEFIT_OF_DOUBT_S = 5.0
"""A machine may be so busy that a call which blocks nothing seems to."""


@contextmanager
def watching_calls(*, silent_s: float = SILENT_S) -> Iterator[None]:
    """Watch the calls of the event loop that runs in this thread."""
    watch = _Watch(asyncio.get_running_loop(), threading.get_ident(), silent_s)
    watch.start()
    try:
        yield
    finally:
        watch.end()


@asynccontextmanager
async def beating(*, bound_s: float) -> AsyncIterator[None]:
    """Have the event loop of this task beat each second; blocked for longer than `bound_s` it counts as stuck."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(_MOST_PERIOD_S)
            moved(works=False)

    does("its first steps", bound_s=bound_s)
    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        does("its end")


class _Watch(threading.Thread):
    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int, silent_s: float) -> None:
        super().__init__(name="silence", daemon=True)
        self._loop = loop
        self._thread_id = thread_id
        self._silent_s = silent_s
        self._period_s = min(_MOST_PERIOD_S, silent_s / 4)
        self._is_over = threading.Event()
        self._answered = threading.Event()
        self._answered.set()
        self._asked_at = 0.0
        self._next_s: dict[tuple[str, str], float] = {}
        self._blocking: Call | None = None

    def end(self) -> None:
        """Stop watching."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        """Look until the end."""
        while not self._is_over.wait(self._period_s):
            blocking = self._blocking_call()
            if blocking is not None:
                call, frame, seconds = blocking
                self._report([(call, seconds)], "blocks all others", at=place_of_frame(frame))
                self._end_if_over(call, frame, seconds)
                continue
            silent = [(call, call.silent_s) for call in tuple(RUNNING)]
            self._report(silent, "is silent")

    def _blocking_call(self) -> tuple[Call, FrameType, float] | None:
        """Return the call that keeps the event loop from answering, where it is, and for how many seconds."""
        if self._answered.is_set():
            self._blocking = None
            self._answered.clear()
            self._asked_at = awake_s()
            self._loop.call_soon_threadsafe(self._answered.set)
            return None
        innermost = sys._current_frames().get(self._thread_id)
        call = _call_in(innermost)
        if call is not self._blocking:  # another one in the same turn of the loop: the time before was not its
            self._blocking, self._asked_at = call, awake_s()
        if call is None or innermost is None:
            return None
        return call, innermost, awake_s() - self._asked_at

    def _report(self, calls: Iterable[tuple[Call, float]], how: str, at: str | None = None) -> None:
        """Name the longest silence of every method of every environment, when it is time to."""
        longest: dict[tuple[str, str], tuple[Call, float]] = {}
        numbers: dict[tuple[str, str], int] = {}
        for call, seconds in calls:
            key = (call.environment, call.method)
            if seconds >= self._silent_s:
                numbers[key] = numbers.get(key, 0) + 1
                longest[key] = max(longest.get(key, (call, 0.0)), (call, seconds), key=lambda one: one[1])
        self._next_s = {key: next_s for key, next_s in self._next_s.items() if key in longest}
        for key, (call, seconds) in longest.items():
            if seconds < self._next_s.get(key, 0.0):
                continue
            self._next_s[key] = 2 * seconds
            place = at or place_of_task(call.task)
            others = f" (and {numbers[key] - 1} more like it)" if numbers[key] > 1 else ""
            report(f"{call.name} {how} for {seconds:.0f} s in {call.method}() at {place}{others}")

    def _end_if_over(self, call: Call, frame: FrameType, seconds: float) -> None:
        if call.timeout_s is None or seconds <= call.timeout_s + _BENEFIT_OF_DOUBT_S:
            return
        failure = EnvironmentFailure(
            f"{call.what}: {call.method}() has blocked the event loop for longer than {call.timeout_s:g} s "
            f"(timeout_s), at {place_of_frame(frame)}. What takes long must be awaited: `await asyncio.to_thread(...)`"
        )
        # Nothing else can end this process in order: its main thread is where the environment is stuck.
        sys.stderr.write(f"error: {failure}\n")
        sys.stderr.flush()
        os._exit(STUCK)


def _call_in(frame: FrameType | None) -> Call | None:
    """Return the call that a thread is in: that of the task that runs in it, by the coroutines on its stack."""
    calls = [(call, getattr(call.task.get_coro(), "cr_frame", None)) for call in tuple(RUNNING) if call.task]
    while frame is not None:
        for call, outermost in calls:
            if outermost is frame:
                return call
        frame = frame.f_back
    return None
