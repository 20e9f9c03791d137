"""One batch after another: the weights of its version, its rollouts, its numbers, the journal."""

from __future__ import annotations

import logging
import time

from holdfast.orchestrator.batches.batch_maker import BatchMaker
from holdfast.orchestrator.batches.batch_publisher import BatchPublisher
from holdfast.orchestrator.batches.metrics import BatchTimes, batch_metrics
from holdfast.orchestrator.current_phase import phase
from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.evaluation.online import PolicyEvaluation
from holdfast.orchestrator.weight_push.push import WeightPusher
from holdfast.orchestrator.weight_push.transport import PublishedWeights
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.process import events
from holdfast.shared.process.timeline import span
from holdfast.shared.wire.rollouts import Batch

_log = logging.getLogger("orchestrator")


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
