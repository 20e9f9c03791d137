"""Makes and publishes one batch after another: policy version, rollouts, metrics, journal.

`StrictSchedule` decides which policy version samples a batch: batch N is sampled wholly by version
`max(0, N - 1 - async_level)`. So timing never decides which policy made a batch. The schedule is its own backpressure:
batch N cannot begin before the trainer has published that version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import RunDirError
from holdfast.orchestrator.batch_maker import BatchMaker
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.evaluation.online import PolicyEvaluation
from holdfast.orchestrator.generation_log import discard_generations
from holdfast.orchestrator.metrics import BatchTimes, batch_metrics
from holdfast.orchestrator.tasks import phase
from holdfast.orchestrator.weight_sync import PublishedWeights, WeightPusher, WeightTransport
from holdfast.process import events
from holdfast.protocol.rollouts import Batch
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import span

_log = logging.getLogger("orchestrator")


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


class BatchPipeline:
    """Makes batches and hands them to the publisher, which writes one while the next one is generated."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        client: InferenceClient,
        publisher: BatchPublisher,
        pusher: WeightPusher,
        maker: BatchMaker,
        evaluation: PolicyEvaluation | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._publisher = publisher
        self._pusher = pusher
        self._maker = maker
        self._evaluation = evaluation
        self._ended = time.perf_counter()
        self._busy_s = client.busy_s
        self._counts = client.counts()

    async def begin(self, step: int, *, version: int) -> None:
        """Make the engines serve `version` for batch `step`, and have them prove that they compute with it.

        Raises:
            InferenceError: the weights did not come, or an engine serves or computes something else.
        """
        events.report("waiting for weights", version=version)
        with span("wait_for_weights", step=step, version=version):
            weights = await self._wait_for(version)
        with span("update_weights", step=step, version=version):
            weights = await self._serve(weights)
        events.report("generating", step=step, version=weights.version)
        self._ended, self._busy_s = time.perf_counter(), self._client.busy_s
        self._counts = self._client.counts()

    async def produce(self, step: int, *, version: int) -> None:
        """Make batch `step` by policy `version`, and submit it with the state after it.

        Raises:
            HoldfastError: the weights did not come, an engine or an environment failed, or the batch before
                could not be written.
        """
        waiting = time.perf_counter()
        with span("wait_for_weights", step=step, version=version):
            weights = await self._wait_for(version)
        updating = time.perf_counter()
        with span("update_weights", step=step, version=version):
            weights = await self._serve(weights)
        generating = time.perf_counter()
        with (
            phase(f"generating batch {step}", version=weights.version),
            span("generate", step=step, version=weights.version),
        ):
            selection = await self._maker.make(step, weights)
        made = time.perf_counter()
        evaluated = await self._evaluate(weights)
        now = time.perf_counter()
        times = BatchTimes(
            period=now - self._ended,
            wait_for_weights=updating - waiting,
            update_weights=generating - updating,
            generate=made - generating,
            busy=self._client.busy_s - self._busy_s,
        )
        counts = self._client.counts()
        of_engines = [after.since(before) for after, before in zip(counts, self._counts, strict=True)]
        self._ended, self._busy_s, self._counts = now, self._client.busy_s, counts
        metrics = batch_metrics(
            selection,
            times,
            step=step,
            num_reused=self._maker.num_reused,
            engines=of_engines,
            environments=self._config.environments,
            signal=self._config.signal if self._config.dynamic_sampling else None,
        )
        metrics |= self._maker.curriculum_metrics | evaluated
        batch = Batch(
            step=step,
            policy_version=weights.version,
            weights_digest="" if self._config.is_sampled_by_teacher else weights.digest,
            teacher_digest=self._maker.state.teacher_digest,
            rollouts=selection.rollouts,
            dropped=selection.dropped,
            metrics=metrics,
        )
        # The state after this batch, in the same rename as the batch.
        await self._publisher.submit(batch, self._maker.state.encode())
        _log.info(
            "batch %d by version %d: reward %.4f, %.1f tokens, %d groups dropped, %.2f s (waited %.2f s for weights)",
            step,
            weights.version,
            metrics["reward/mean"],
            metrics["rollout/tokens_mean"],
            len(selection.dropped),
            times.period,
            times.wait_for_weights,
        )

    async def _evaluate(self, weights: PublishedWeights) -> dict[str, float]:
        """Evaluate the version that has just made a batch, if that is due; return metrics for this batch.

        That it was done is in the state of the same batch, so its numbers come with one batch, whatever is killed.
        """
        state, begin = self._maker.state, time.perf_counter()
        if self._evaluation is None or not self._evaluation.is_due(weights.version, after=state.evaluated_version):
            return {}
        with phase("evaluating", version=weights.version), span("evaluate", version=weights.version):
            metrics = await self._evaluation.evaluate(weights)
        state.evaluated_version = weights.version
        return metrics | {"time/evaluate": time.perf_counter() - begin}

    async def _wait_for(self, version: int) -> PublishedWeights:
        with phase("waiting for weights", version=version):
            # A batch that cannot be written ends this wait: no later version comes without it.
            return await self._pusher.wait_for(version, check=self._publisher.check)

    async def _serve(self, weights: PublishedWeights) -> PublishedWeights:
        """Make the engines serve `weights`. A teacher serves what it has."""
        if self._config.is_sampled_by_teacher:
            return weights
        return await self._pusher.serve(weights, check=self._publisher.check)


class StrictSchedule:
    """Says which policy version each batch must be sampled by.

    Args:
        transport: by which published weights come to the engines.
        async_level: how many optimizer steps the policy of a batch may be behind.
        trainer_step: the step that the trainer began after.
    """

    def __init__(self, transport: WeightTransport, *, async_level: int, trainer_step: int) -> None:
        self._transport = transport
        self._async_level = async_level
        self._trainer_step = trainer_step

    def version_for(self, step: int) -> int:
        """Return the version that samples batch `step`.

        The first batches after a resume may want versions from before the checkpoint. Where those are
        still published they are used, so the batch is the one that an uninterrupted run makes;
        where not, the resumed version samples it.
        """
        # Batch N is trained by step N, on weights N - 1; the first ones have version 0 alone.
        wanted = max(0, step - 1 - self._async_level)
        if wanted >= self._trainer_step or self._transport.is_published(wanted):
            return wanted
        _log.warning(
            "batch %d: policy version %d is no longer in %s, so version %d samples it: from here on this run differs "
            "from an uninterrupted one",
            step,
            wanted,
            self._transport.place,
            self._trainer_step,
        )
        return self._trainer_step
