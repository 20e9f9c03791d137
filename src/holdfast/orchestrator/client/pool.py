"""The pool of engines of a client: which engines are usable, and how lost engines come back.

An engine is lost if a connection breaks, if it is busy or fails, or if it serves wrong weights. Then the pool only asks
for its health. A healthy engine is used again after it has proven model and weights. `holdfast.inference.access` is the
other side of `Lease`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import msgspec

from holdfast.errors import ConfigError, HoldfastError, InferenceError, printable
from holdfast.orchestrator.client.http import HttpTransport, Unavailable, decode
from holdfast.orchestrator.tasks import run_all
from holdfast.process.events import report
from holdfast.process.heartbeat import Wait, awake_s
from holdfast.protocol import inference
from holdfast.run.run_dir import RunDir, owner_of

_log = logging.getLogger("orchestrator")

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
# A server gets at least so many attempts.
_ATTEMPTS = 5
# Longer pauses that a server asks for are cut to this.
_LONGEST_PAUSE_S = 60.0


class EngineLost(InferenceError):
    """A server was away, or failed, for too long."""


@dataclass
class RetryPolicy:
    """How long one request is tried: until all attempts have failed for `limit_s` (setting `key`)."""

    limit_s: float
    _: KW_ONLY
    key: str
    _attempts: int = 0
    _since: float = 0.0
    _backoff_s: float = FIRST_BACKOFF_S

    def count(self, failure: Unavailable, *, url: str) -> None:
        """Count a failed attempt. Raises EngineLost if the attempts failed often and for long enough."""
        self._attempts += 1
        # From the first failure on: a slow answer is not a failure.
        if self._attempts == 1:
            self._since = awake_s()
        failing_s = awake_s() - self._since
        if self._attempts >= _ATTEMPTS and failing_s >= min(self.limit_s, failure.retry_for_s):
            raise EngineLost(
                f"{url} was lost {self._attempts} times in a row within {failing_s:.0f} s ({self.key}): {failure}"
            )

    async def pause(self, failure: Unavailable) -> None:
        """Wait after a failed attempt: twice as long as the last time, or as long as the server asked for."""
        await asyncio.sleep(max(self._backoff_s, asked_pause_s(failure)))
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)


def asked_pause_s(failure: Unavailable) -> float:
    """Return the pause that a server asked for, within limits."""
    return min(failure.retry_after_s, _LONGEST_PAUSE_S)


class EngineCounts(NamedTuple):
    """Answered requests and losses of one engine, and the sum of its sequences in flight over seconds."""

    requests: int = 0
    failures: int = 0
    in_flight_s: float = 0.0

    def since(self, before: EngineCounts) -> EngineCounts:
        return EngineCounts(
            self.requests - before.requests, self.failures - before.failures, self.in_flight_s - before.in_flight_s
        )


@dataclass(eq=False)
class Engine:
    """One server.

    Attributes:
        is_there: usable, as far as is known.
        is_checked: it serves the right model.
        is_missed: away for longer than `ready_timeout_s`.
        epoch: how often it came back.
        in_flight: sequences that it samples for us now, at most `max_concurrency`.
        failures: how often it was lost after it had been there.
    """

    url: str
    transport: HttpTransport
    _: KW_ONLY
    key: str
    ready_timeout_s: float
    max_concurrency: int = 256
    is_there: bool = True
    is_checked: bool = False
    is_missed: bool = False
    epoch: int = 0
    in_flight: int = 0
    failures: int = 0
    _requests: int = 0
    _in_flight_s: float = 0.0
    _counted_at: float = field(default_factory=time.monotonic)
    _boot_id: str = ""

    def note_boot(self, boot_id: str) -> None:
        """Log a restart, if the process of the server is another one."""
        if self._boot_id not in ("", boot_id):
            _log.warning("%s was restarted", self.url)
        self._boot_id = boot_id

    def has_room(self, num_sequences: int) -> bool:
        """Whether it may sample so many more; a request above `max_concurrency` gets an idle engine."""
        return self.in_flight == 0 or self.in_flight + num_sequences <= self.max_concurrency

    @contextmanager
    def sampling(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as in flight meanwhile, and the request as answered if nothing is raised."""
        self._move(num_sequences)
        try:
            yield
            self._requests += 1
        finally:
            self._move(-num_sequences)

    def counts(self) -> EngineCounts:
        self._move(0)
        return EngineCounts(self._requests, self.failures, self._in_flight_s)

    def _move(self, num_sequences: int) -> None:
        now = time.monotonic()
        self._in_flight_s += self.in_flight * (now - self._counted_at)
        self._counted_at = now
        self.in_flight += num_sequences

    async def wait_for_health(self) -> None:
        """Wait until the server is healthy. Raises EngineLost after `ready_timeout_s`."""
        wait = Wait(self.ready_timeout_s)
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self.transport.get(self.url, inference.HEALTH_ROUTE)
                return
            except Unavailable as failure:
                if wait.is_over():
                    raise EngineLost(
                        f"the inference server {self.url} did not become ready within {self.ready_timeout_s:g} s "
                        f"({self.key}.ready_timeout_s): {failure}. Is it running at this address?"
                    ) from None
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def check(self, *, model: str, seq_len: int) -> None:
        """Check that the server is healthy, and serves `model` and sessions of `seq_len` tokens.

        Raises Unavailable without an answer, InferenceError for another model, ConfigError for too short sessions."""
        await self.transport.get(self.url, inference.HEALTH_ROUTE)
        served = await self.served()
        if not inference.same_model(served.model, model):
            raise InferenceError(
                f"{self.url} serves the model '{printable(served.model)}', this run needs '{model}'. Start the server "
                f"with --model.name {model}, or name the right server in {self.key}.urls."
            )
        try:
            cards = msgspec.json.decode(
                await self.transport.get(self.url, inference.MODELS_ROUTE), type=inference.ModelList
            ).data
        except (InferenceError, Unavailable, ValueError, RecursionError):
            cards = []  # the server itself refuses longer sessions
        longest = cards[0].max_model_len if cards else None
        if longest is not None and longest < seq_len:
            raise ConfigError(
                f"sessions of {seq_len} tokens are more than {self.url} serves (model.max_len = {longest}). "
                "Lower seq_len or raise model.max_len."
            )
        self.is_checked = True

    async def served(self) -> inference.ServedWeights:
        served = decode(
            await self.transport.get(self.url, inference.WEIGHTS_ROUTE), inference.ServedWeights, url=self.url
        )
        self.note_boot(served.boot_id)
        return served

    async def update_weights(self, request: inference.UpdateRequest) -> None:
        await self.transport.post_as_admin(self.url, inference.UPDATE_ROUTE, msgspec.json.encode(request))

    async def claim(self, owner: inference.Owner) -> None:
        """Make a run the owner of the server, or send a heartbeat of the owner."""
        await self.transport.post_as_admin(self.url, inference.CLAIM_ROUTE, msgspec.json.encode(owner), is_probe=True)

    async def release(self, owner: inference.Owner) -> None:
        """Give the server back, if it is this run's."""
        await self.transport.post_as_admin(self.url, inference.RELEASE_ROUTE, msgspec.json.encode(owner), is_probe=True)


_CANCEL_AGAIN_S = 0.1

# Work with one engine; raises `Unavailable` if the engine is lost meanwhile.
Work = Callable[[Engine], Awaitable[object]]


class EnginePool:
    """Engines that can replace one another."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._check: Work | None = None
        self._restore: Work | None = None
        self._changes = 0
        self._failure: BaseException | None = None
        self._recoveries: dict[Engine, asyncio.Task[None]] = {}
        # Set while an engine is there, or no engine will come.
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._has_changed = asyncio.Event()

    async def close(self) -> None:
        while pending := [recovery for recovery in self._recoveries.values() if not recovery.done()]:
            for recovery in pending:
                recovery.cancel()
            # Repeated: asyncio.wait_for loses a cancellation that comes together with a result.
            await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)

    async def require(self, check: Work) -> None:
        """Check every engine before its first use; return when one has passed.

        Raises EngineLost if no engine came in time, or what `check` raises."""
        self._check = check
        await self.attend(check)
        await self.wait_for_any()

    def expect(self, restore: Work) -> None:
        """From now on run `restore` with every engine that comes back."""
        self._restore = restore
        self._changes += 1
        self._failure = None
        for engine in self.engines:
            recovery = self._recoveries.get(engine)
            if not engine.is_there and (recovery is None or recovery.done()):
                self._recover(engine, Unavailable("it could not be given what it should serve"))
        self._note_change()

    async def attend(self, work: Work) -> None:
        """Do `work` with all usable engines at once; engines that are lost meanwhile are left out."""

        async def attend(engine: Engine) -> None:
            epoch = engine.epoch
            try:
                await work(engine)
            except Unavailable as failure:
                self.lose(engine, epoch=epoch, failure=failure)

        await run_all(attend(engine) for engine in self.engines if engine.is_there)

    async def wait_for_any(self) -> list[Engine]:
        """Return the usable engines, as soon as there is one.

        Raises EngineLost if no engine came in time, HoldfastError if one came back and failed its checks."""
        while True:
            await self._is_open.wait()
            if self._failure is not None:
                raise self._failure
            if there := self.there():
                return there

    async def wait_for_room(self, num_sequences: int, *, but: Collection[Engine] = ()) -> list[Engine]:
        """Return the engines with room for so many sequences, as soon as there is one; for one waiter.

        Engines in `but` are only used if no other is usable."""
        while True:
            self._has_changed.clear()
            there = await self.wait_for_any()
            wanted = [engine for engine in there if engine not in but] or there
            if with_room := [engine for engine in wanted if engine.has_room(num_sequences)]:
                return with_room
            await self._has_changed.wait()

    def note_room(self) -> None:
        """Wake who waits for room."""
        self._has_changed.set()

    def there(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.is_there]

    def lose(self, engine: Engine, *, epoch: int, failure: Unavailable) -> None:
        """Note that an engine was lost, unless the loss in this `epoch` is known already."""
        if engine.epoch != epoch or not engine.is_there:
            return
        engine.is_there = False
        engine.failures += engine.is_checked  # at the start it has never been there
        self._recover(engine, failure)
        self._note_change()

    def _recover(self, engine: Engine, failure: Unavailable) -> None:
        recovery = self._recoveries[engine] = asyncio.create_task(self._bring_back(engine, failure))
        recovery.add_done_callback(lambda _: self._note_end(engine, recovery))

    async def _bring_back(self, engine: Engine, failure: Unavailable) -> None:
        known = logging.WARNING if engine.is_checked else logging.INFO  # at the start servers still load
        _log.log(known, "%s: %s; waiting for it", engine.url, failure)
        await asyncio.sleep(asked_pause_s(failure))
        while not await self._has_entered(engine):
            engine.is_missed = True
        # No await since the last check: the engine still has the right weights.
        engine.epoch += 1
        engine.is_there, engine.is_missed = True, False
        self._note_change()

    def _note_end(self, engine: Engine, recovery: asyncio.Task[None]) -> None:
        error = None if recovery.cancelled() else recovery.exception()
        if self._recoveries.get(engine) is not recovery:
            return  # it was lost again, or other weights are wanted meanwhile
        del self._recoveries[engine]
        if error is not None:
            self._failure = error
            self._note_change()

    async def _has_entered(self, engine: Engine) -> bool:
        """Return whether the engine came back in time. Raises EngineLost if all engines are away for too long."""
        attempts = RetryPolicy(engine.ready_timeout_s, key=f"{engine.key}.ready_timeout_s")
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
                    continue  # the failed weights are not wanted any more
                if changes == self._changes:  # else other weights are wanted by now
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


# Well within any `server.lease_s`.
_HEARTBEAT_S = 5.0


class Lease:
    """Claims engines for the run in `run_dir`, sends heartbeats, and releases the engines; None: it owns nothing."""

    def __init__(self, pool: EnginePool, transport: HttpTransport, run_dir: RunDir | None) -> None:
        self._pool = pool
        self._transport = transport
        self._run_dir = run_dir
        self._owner: inference.Owner | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_released = asyncio.Event()

    async def claim_if_begun(self) -> None:
        """Claim the engines if the run has begun; otherwise its trainer has not been started by hand yet."""
        if self._run_dir is not None and self._run_dir.holds_run():
            await self.claim()

    async def claim(self) -> inference.Owner:
        """Own the engines until `release`, and return the owner. Raises InferenceError if another run owns one."""
        if self._owner is not None:
            return self._owner
        assert self._run_dir is not None, "a run claims its engines"
        owner = self._owner = owner_of(self._run_dir)
        self._transport.run_id = owner.run_id
        # A heartbeat, or the first weights, will claim an engine that is away.
        await self._pool.attend(lambda engine: engine.claim(owner))
        self._heartbeat = asyncio.create_task(self._send_heartbeats(owner))
        return owner

    async def release(self) -> None:
        """Release the engines, also engines that an earlier attempt claimed."""
        if self._run_dir is None or not self._run_dir.holds_run():
            return
        owner = self._owner or owner_of(self._run_dir)
        self._is_released.set()
        if self._heartbeat is not None:  # a claim that is under way would own the engine again
            await self._heartbeat
        failed = "%s was not given back, so other runs cannot use it yet: %s"
        await self._tell_all(lambda engine: engine.release(owner), failed, level=logging.WARNING)

    async def close(self) -> None:
        """Send no more heartbeats."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)

    async def _send_heartbeats(self, owner: inference.Owner) -> None:
        """Claim every engine again every few seconds: a restarted one has forgotten its owner."""
        while not self._is_released.is_set():
            failed = "%s did not get a heartbeat: %s"
            await self._tell_all(lambda engine: engine.claim(owner), failed, level=logging.DEBUG)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_released.wait(), _HEARTBEAT_S)

    async def _tell_all(self, tell: Work, failed: str, *, level: int) -> None:
        async def tell_one(engine: Engine) -> None:
            try:
                await tell(engine)
            except (InferenceError, Unavailable) as error:
                _log.log(level, failed, engine.url, error)

        await run_all(tell_one(engine) for engine in self._pool.engines)
