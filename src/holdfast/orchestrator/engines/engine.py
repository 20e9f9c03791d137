"""One inference server: whether it is there, what it serves, and whose it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from holdfast.orchestrator.engines.http import HttpTransport, Unavailable, decode
from holdfast.orchestrator.engines.retry import FIRST_BACKOFF_S, LAST_BACKOFF_S, EngineLost, RetryPolicy
from holdfast.shared.errors import ConfigError, InferenceError
from holdfast.shared.printable import printable
from holdfast.shared.process.heartbeat import Wait
from holdfast.shared.wire.inference_api import (
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

_log = logging.getLogger("orchestrator")


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
