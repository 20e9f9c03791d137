"""Owning the engines of a run: see `holdfast.inference.ownership` for what that gives it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from holdfast.orchestrator.engines.engine import Engine
from holdfast.orchestrator.engines.http import HttpTransport, Unavailable
from holdfast.orchestrator.engines.pool import EnginePool
from holdfast.orchestrator.task_group import run_all
from holdfast.shared.errors import InferenceError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.files.run_owner import owner_of
from holdfast.shared.wire.inference_api import Owner

_log = logging.getLogger("orchestrator")

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
