"""Which engines of a client are there, and how those that are not come back, while the others are asked.

An engine is lost when a connection to it breaks, when it is busy or fails, or when it serves other weights than it
should. From then on it is asked for its health alone, until it is well and has gone through what every engine must:
the right model, and the right weights, read back. Only then is it asked for rollouts again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from holdfast.orchestrator.engines.engine import Engine
from holdfast.orchestrator.engines.http import Unavailable
from holdfast.orchestrator.engines.retry import EngineLost, asked_pause_s
from holdfast.orchestrator.task_group import run_all
from holdfast.shared.errors import HoldfastError
from holdfast.shared.process.events import report

_log = logging.getLogger("orchestrator")

_CANCEL_AGAIN_S = 0.1

# Done with one engine; raises `Unavailable` where it is lost meanwhile.
Work = Callable[[Engine], Awaitable[object]]


class EnginePool:
    """Engines that stand in for one another.

    Attributes:
        engines: all of them, there or not.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._check: Work | None = None
        self._restore: Work | None = None
        self._changes = 0
        self._failure: BaseException | None = None
        self._recoveries: dict[Engine, asyncio.Task[None]] = {}
        # Set while somebody can be asked, or it is known that nobody ever can.
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._has_changed = asyncio.Event()

    async def close(self) -> None:
        """Wait for no engine any more."""
        while pending := [recovery for recovery in self._recoveries.values() if not recovery.done()]:
            for recovery in pending:
                recovery.cancel()
            # Again, until it is heard: asyncio.wait_for forgets a cancellation that comes together with a result.
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)

    async def require(self, check: Work) -> None:
        """Have every engine pass `check` before it is asked anything; return when one has.

        Raises:
            EngineLost: none came in time.
            HoldfastError: one of those that are there does not pass.
        """
        self._check = check
        await self.attend(check)
        await self.wait_for_any()

    def expect(self, restore: Work) -> None:
        """From now on have every engine that comes back go through `restore`, in place of what was asked before."""
        self._restore = restore
        self._changes += 1
        self._failure = None
        for engine in self.engines:
            if not engine.is_there and engine not in self._recoveries:
                self._recover(engine, Unavailable("it could not be given what it should serve"))
        self._note_change()

    async def attend(self, work: Work) -> None:
        """Do `work` with every engine that is there, at once; those that are lost meanwhile are waited for by nobody.

        Raises:
            HoldfastError: whatever `work` raises but `Unavailable`.
        """

        async def attend(engine: Engine) -> None:
            epoch = engine.epoch
            try:
                await work(engine)
            except Unavailable as failure:
                self.lose(engine, epoch=epoch, failure=failure)

        await run_all(attend(engine) for engine in self.engines if engine.is_there)

    async def wait_for_any(self) -> list[Engine]:
        """Return the engines that are there, as soon as one is.

        Raises:
            EngineLost: none came in time.
            HoldfastError: one came back and is not what it should be.
        """
        while True:
            await self._is_open.wait()
            if self._failure is not None:
                raise self._failure
            if there := self.there():
                return there

    async def wait_for_room(self, num_sequences: int, *, but: Collection[Engine] = ()) -> list[Engine]:
        """Return the engines that are there and may sample as many sequences more, as soon as one may; for one waiter.

        Args:
            but: those that are taken only where no other is there, with room or without.

        Raises:
            EngineLost, HoldfastError: as `wait_for_any`.
        """
        while True:
            self._has_changed.clear()
            there = await self.wait_for_any()
            wanted = [engine for engine in there if engine not in but] or there
            if with_room := [engine for engine in wanted if engine.has_room(num_sequences)]:
                return with_room
            await self._has_changed.wait()

    def note_room(self) -> None:
        """Say that an engine has sampled something to its end."""
        self._has_changed.set()

    def there(self) -> list[Engine]:
        """Return the engines that are there."""
        return [engine for engine in self.engines if engine.is_there]

    def lose(self, engine: Engine, *, epoch: int, failure: Unavailable) -> None:
        """Say that an engine was lost. Of an `epoch` that is over, somebody else has said so before."""
        if engine.epoch != epoch or not engine.is_there:
            return
        engine.is_there = False
        engine.failures += engine.is_checked  # at the start it is only not there yet
        self._recover(engine, failure)
        self._note_change()

    def _recover(self, engine: Engine, failure: Unavailable) -> None:
        recovery = self._recoveries[engine] = asyncio.create_task(self._bring_back(engine, failure))
        recovery.add_done_callback(lambda _: self._note_end(engine, recovery))

    async def _bring_back(self, engine: Engine, failure: Unavailable) -> None:
        """Wait for a lost engine, and have it go through what it must."""
        known = logging.WARNING if engine.is_checked else logging.INFO  # at the start servers still load
        _log.log(known, "%s: %s; waiting for it", engine.url, failure)
        await asyncio.sleep(asked_pause_s(failure))
        while not await self._has_entered(engine):
            engine.is_missed = True
        # At once: until somebody else has a turn, it has what it should have.
        engine.epoch += 1
        engine.is_there, engine.is_missed = True, False
        self._note_change()

    def _note_end(self, engine: Engine, recovery: asyncio.Task[None]) -> None:
        """Hand what ended a recovery to those that wait for an engine."""
        if self._recoveries.get(engine) is recovery:  # else it was lost again meanwhile
            del self._recoveries[engine]
        if not recovery.cancelled() and (error := recovery.exception()) is not None:
            self._failure = error
            self._note_change()

    async def _has_entered(self, engine: Engine) -> bool:
        """Whether the engine came back in time; if not, others are there or may still come.

        Raises:
            EngineLost: it did not, and the others did not, either.
        """
        attempts = engine.retry_policy()
        try:
            while True:
                await engine.wait_for_health()
                changes = self._changes
                try:
                    if self._check is not None and not engine.is_checked:
                        await self._check(engine)
                    if self._restore is not None:
                        await self._restore(engine)
                except Unavailable as failure:
                    _log.warning("%s: %s; waiting for it", engine.url, failure)
                    attempts.count(failure, url=engine.url)
                    await attempts.pause(failure)
                    continue
                except HoldfastError:
                    if changes == self._changes:
                        raise
                    continue  # of what it should have had, which nobody wants any more
                if changes == self._changes:  # else it has, by now, what it should have had
                    return True
        except EngineLost as lost:
            if all(other.is_missed for other in self.engines if other is not engine):
                raise
            if not engine.is_missed:
                report("WARNING: the run goes on without an inference server, until it is back", url=engine.url)
            _log.warning("%s; going on with the others", lost)
            return False

    def _note_change(self) -> None:
        self._has_changed.set()
        if self._failure is not None or self.there():
            self._is_open.set()
        else:
            self._is_open.clear()
