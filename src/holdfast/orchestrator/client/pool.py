"""The pool of engines of a client: which engines are usable, and how lost engines come back.

An engine is lost if a connection to it breaks, if it is busy or fails, or if it serves the wrong weights. From then on
the pool only asks for its health. A healthy engine must first pass the checks of every engine: the right model, and the
right weights, read back. Only then does it get rollouts again. `holdfast.inference.access` says what `Lease` gives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from holdfast.errors import ConfigError, HoldfastError, InferenceError, printable
from holdfast.orchestrator.client.http import HttpTransport, Unavailable, decode
from holdfast.orchestrator.tasks import run_all
from holdfast.process.events import report
from holdfast.process.heartbeat import Wait, awake_s
from holdfast.protocol.inference import (
    CLAIM_ROUTE,
    HEALTH_ROUTE,
    MODELS_ROUTE,
    RELEASE_ROUTE,
    UPDATE_ROUTE,
    WEIGHTS_ROUTE,
    ModelList,
    Owner,
    ServedWeights,
    UpdateRequest,
    same_model,
)
from holdfast.run.run_dir import RunDir, owner_of

_log = logging.getLogger("orchestrator")

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
# As often a server is asked again however long that took.
_ATTEMPTS = 5
# A server that asks for a longer pause is asked earlier, and may say it again.
_LONGEST_PAUSE_S = 60.0


class EngineLost(InferenceError):
    """A server was away, or failed, for longer than is waited for. Others may be there."""


class RetryPolicy:
    """How long one request goes on asking one server, or several that stand in for one another.

    Args:
        limit_s: how long they may fail in a row.
        key: dotted key of `limit_s`, for errors.
    """

    def __init__(self, limit_s: float, *, key: str) -> None:
        self._limit_s = limit_s
        self._key = key
        self._attempts = 0
        self._since = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    def count(self, failure: Unavailable, *, url: str) -> None:
        """Count a failed attempt, at the server at `url`.

        Raises:
            EngineLost: it failed often and for long enough.
        """
        self._attempts += 1
        # From the first failure on, not from the request: a slow answer is no failure.
        if self._attempts == 1:
            self._since = awake_s()
        failing_s = awake_s() - self._since
        if self._attempts >= _ATTEMPTS and failing_s >= min(self._limit_s, failure.retry_for_s):
            raise EngineLost(
                f"{url} was lost {self._attempts} times in a row within {failing_s:.0f} s ({self._key}): {failure}"
            )

    async def pause(self, failure: Unavailable) -> None:
        """Wait after a failed attempt: twice as long as the last time, and as long as the server asked for."""
        await asyncio.sleep(max(self._backoff_s, asked_pause_s(failure)))
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)


def asked_pause_s(failure: Unavailable) -> float:
    """Return for how many seconds a server that asked for it is left alone."""
    return min(failure.retry_after_s, _LONGEST_PAUSE_S)


class EngineCounts(NamedTuple):
    """What one engine was asked, since its client was made or within some time.

    Attributes:
        requests: answered ones.
        failures: how often it was lost once it had been there.
        in_flight_s: sequences in flight, summed over seconds.
    """

    requests: int = 0
    failures: int = 0
    in_flight_s: float = 0.0

    def since(self, before: EngineCounts) -> EngineCounts:
        """Return what came after `before`."""
        return EngineCounts(
            self.requests - before.requests, self.failures - before.failures, self.in_flight_s - before.in_flight_s
        )


class Engine:
    """One server.

    Attributes:
        url: its address.
        is_there: it answers and serves what it should, as far as is known.
        is_checked: it was found to serve the right model.
        is_missed: it has been away for so long that nobody would wait for it alone.
        epoch: how often it was lost and found again.
        in_flight: sequences that it samples for us now.
        failures: how often it was lost once it had been there.

    Args:
        key: of the section of the configuration that names it, for errors.
        ready_timeout_s: how long it may be away, or fail in a row.
        max_concurrency: most sequences that it samples for us at once.
    """

    def __init__(
        self, url: str, transport: HttpTransport, *, key: str, ready_timeout_s: float, max_concurrency: int = 256
    ) -> None:
        self.url = url
        self._max_concurrency = max_concurrency
        self.is_there = True
        self.is_checked = False
        self.is_missed = False
        self.epoch = 0
        self.in_flight = 0
        self.failures = 0
        self._requests = 0
        self._in_flight_s = 0.0
        self._counted_at = time.monotonic()
        self._transport = transport
        self._key = key
        self._ready_timeout_s = ready_timeout_s
        self._boot_id = ""

    def note_boot(self, boot_id: str) -> None:
        """Say that the server was restarted, if its process is another. It need not have been asked anything since."""
        if self._boot_id not in ("", boot_id):
            _log.warning("%s was restarted", self.url)
        self._boot_id = boot_id

    def retry_policy(self) -> RetryPolicy:
        """Return how long to go on asking it, for one request."""
        return RetryPolicy(self._ready_timeout_s, key=f"{self._key}.ready_timeout_s")

    def has_room(self, num_sequences: int) -> bool:
        """Whether it may sample as many more; one request more than it may sample at once goes to it alone."""
        return self.in_flight == 0 or self.in_flight + num_sequences <= self._max_concurrency

    @contextmanager
    def sampling(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as in flight while the block runs, and the request as answered where it raises nothing."""
        self._move(num_sequences)
        try:
            yield
            self._requests += 1
        finally:
            self._move(-num_sequences)

    def counts(self) -> EngineCounts:
        """Return what it was asked so far."""
        self._move(0)
        return EngineCounts(self._requests, self.failures, self._in_flight_s)

    def _move(self, num_sequences: int) -> None:
        now = time.monotonic()
        self._in_flight_s += self.in_flight * (now - self._counted_at)
        self._counted_at = now
        self.in_flight += num_sequences

    async def wait_for_health(self) -> None:
        """Wait until the server says that it works.

        Raises:
            EngineLost: it did not within `ready_timeout_s`.
        """
        wait = Wait(self._ready_timeout_s)
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._transport.get(self.url, HEALTH_ROUTE)
                return
            except Unavailable as failure:
                if wait.is_over():
                    raise EngineLost(
                        f"the inference server {self.url} did not become ready within {self._ready_timeout_s:g} s "
                        f"({self._key}.ready_timeout_s): {failure}. Is it running at this address?"
                    ) from None
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def check(self, *, model: str, seq_len: int) -> None:
        """Check that the server works, and serves `model` and sessions of `seq_len` tokens.

        Raises:
            Unavailable: it does not answer.
            InferenceError: it serves another model.
            ConfigError: its longest session is shorter.
        """
        await self._transport.get(self.url, HEALTH_ROUTE)
        served = await self.served()
        if not same_model(served.model, model):
            raise InferenceError(
                f"{self.url} serves the model '{printable(served.model)}', this run needs '{model}'. Start the server "
                f"with --model.name {model}, or name the right server in {self._key}.urls."
            )
        try:
            cards = msgspec.json.decode(await self._transport.get(self.url, MODELS_ROUTE), type=ModelList).data
        except (InferenceError, Unavailable, ValueError, RecursionError):
            cards = []  # optional: the server itself refuses what is too long
        longest = cards[0].max_model_len if cards else None
        if longest is not None and longest < seq_len:
            raise ConfigError(
                f"sessions of {seq_len} tokens are more than {self.url} serves (model.max_len = {longest}). "
                "Lower seq_len or raise model.max_len."
            )
        self.is_checked = True

    async def served(self) -> ServedWeights:
        """Return what the server serves; see `HttpTransport.get` for errors."""
        served = decode(await self._transport.get(self.url, WEIGHTS_ROUTE), ServedWeights, url=self.url)
        self.note_boot(served.boot_id)
        return served

    async def update_weights(self, request: UpdateRequest) -> None:
        """Have the server stage and serve other weights; see `HttpTransport.post_as_admin` for errors."""
        await self._transport.post_as_admin(self.url, UPDATE_ROUTE, msgspec.json.encode(request))

    async def claim(self, owner: Owner) -> None:
        """Make a run the owner of the server, or give a sign of life of it; see `HttpTransport` for errors."""
        await self._transport.post_as_admin(self.url, CLAIM_ROUTE, msgspec.json.encode(owner), is_probe=True)

    async def release(self, owner: Owner) -> None:
        """Give the server back, if it is this run's; see `HttpTransport` for errors."""
        await self._transport.post_as_admin(self.url, RELEASE_ROUTE, msgspec.json.encode(owner), is_probe=True)


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
                told = f"WARNING: the run continues without an inference server, until it is back: {engine.url}"
                report(told, url=engine.url)
            _log.warning("%s; going on with the others", lost)
            return False

    def _note_change(self) -> None:
        self._has_changed.set()
        if self._failure is not None or self.there():
            self._is_open.set()
        else:
            self._is_open.clear()


# How often a server hears from the run that owns it, beside its requests: well within any `server.lease_s`.
_SIGN_OF_LIFE_S = 5.0


class Lease:
    """Claims engines for a run, tells them that it lives, and gives them back.

    Args:
        pool: the engines of the run.
        transport: to them; every request says whose it is once they are claimed.
        run_dir: of the run; None: it owns nothing.
    """

    def __init__(self, pool: EnginePool, transport: HttpTransport, run_dir: RunDir | None) -> None:
        self._pool = pool
        self._transport = transport
        self._run_dir = run_dir
        self._owner: Owner | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_released = asyncio.Event()

    async def claim_if_begun(self) -> None:
        """Claim the engines if the run has begun; else its trainer is still to be started, by hand.

        Raises:
            InferenceError: one belongs to another run.
        """
        if self._run_dir is not None and self._run_dir.holds_run():
            await self.claim()

    async def claim(self) -> Owner:
        """Own the engines, until `release` or a silence that is too long; return who owns them. Once is enough.

        Raises:
            InferenceError: one belongs to another run.
        """
        if self._owner is not None:
            return self._owner
        assert self._run_dir is not None, "a run claims its engines"
        owner = self._owner = owner_of(self._run_dir)
        self._transport.run_id = owner.run_id
        # One that is away is claimed by a sign of life, or by the weights that it is given.
        await self._pool.attend(lambda engine: engine.claim(owner))
        self._heartbeat = asyncio.create_task(self._send_heartbeats(owner))
        return owner

    async def release(self) -> None:
        """Give the engines back, also those that an attempt before this one claimed; they serve on."""
        if self._run_dir is None or not self._run_dir.holds_run():
            return
        owner = self._owner or owner_of(self._run_dir)
        self._is_released.set()
        if self._heartbeat is not None:  # a claim that is under way would own the engine again
            await self._heartbeat

        async def release(engine: Engine) -> None:
            try:
                await engine.release(owner)
            except (InferenceError, Unavailable) as error:
                _log.warning("%s was not given back, so other runs cannot use it yet: %s", engine.url, error)

        await run_all(release(engine) for engine in self._pool.engines)

    async def close(self) -> None:
        """Send no more signs of life."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)

    async def _send_heartbeats(self, owner: Owner) -> None:
        """Claim every engine again every few seconds: one that was restarted has forgotten who its owner is."""

        async def claim(engine: Engine) -> None:
            try:
                await engine.claim(owner)
            except (InferenceError, Unavailable) as error:
                _log.debug("%s did not hear a sign of life: %s", engine.url, error)

        while not self._is_released.is_set():
            await asyncio.gather(*(claim(engine) for engine in self._pool.engines))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_released.wait(), _SIGN_OF_LIFE_S)
