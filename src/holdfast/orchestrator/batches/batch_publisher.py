"""Publishes batches behind the back of the event loop, in order."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from holdfast.orchestrator.rollouts.generation_log import discard_generations
from holdfast.shared.errors import RunDirError
from holdfast.shared.files import journal
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.timeline import span
from holdfast.shared.wire.rollouts import Batch


class BatchPublisher:
    """Writes one batch at a time to the journal, on a thread, while the next one is generated.

    Consumes batches with the state after them; produces `rollouts/step_N`. At most one batch waits,
    and batch N is visible before batch N + 1 begins to be written. Use as an async context manager.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        # One worker: batches become visible in their order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._pending: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is being written takes milliseconds; half of it would only be a leftover.
        if self._pending is not None:
            await asyncio.wait([self._pending])
            if error is not None and not self._pending.cancelled():
                # Looked at, so that asyncio does not report it as never retrieved; `error` came first.
                self._pending.exception()
        self._thread.shutdown()

    async def submit(self, batch: Batch, state: bytes) -> None:
        """Publish `batch` soon; waits for the one before.

        Raises:
            RunDirError: the one before could not be published.
        """
        await self.settle()
        self._pending = asyncio.get_running_loop().run_in_executor(self._thread, self._publish, batch, state)

    async def settle(self) -> None:
        """Wait until everything submitted is published.

        Raises:
            RunDirError: it could not be.
        """
        if self._pending is not None:
            # Shielded: where this wait is cancelled, __aexit__ must still find the write to wait for.
            await asyncio.shield(self._pending)
            self._pending = None

    def check(self) -> None:
        """Raise if publishing has failed; never waits."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def _publish(self, batch: Batch, state: bytes) -> None:
        try:
            with span("write_batch", step=batch.step, version=batch.policy_version, lane="journal"):
                journal.publish_batch(self._run_dir, batch, state)
        except OSError as error:
            raise RunDirError(f"batch {batch.step} cannot be written to {self._run_dir.rollouts}: {error}") from error
        # After the batch is durable: until then they are all that is left of it.
        discard_generations(self._run_dir, up_to=batch.step)
