"""Makes and publishes one batch after another: policy version, rollouts, metrics, journal.

One policy version samples a whole batch (`version_for`), so timing never decides which policy made a batch. This is
also the backpressure: a batch cannot begin before the trainer has published its version.
"""

import asyncio
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Self

from holdfast.config.environments import EnvironmentConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import RunDirError
from holdfast.orchestrator.batch_maker import BatchMaker, Selection
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.pool import EngineCounts
from holdfast.orchestrator.episodes import is_solved
from holdfast.orchestrator.evaluation.evaluator import PolicyEvaluation
from holdfast.orchestrator.evaluation.statistics import pass_at_k
from holdfast.orchestrator.generation_log import discard_generations
from holdfast.orchestrator.tasks import phase
from holdfast.orchestrator.weight_sync import PublishedWeights, WeightPusher
from holdfast.process import events
from holdfast.protocol.rollouts import DROP_REASONS, Batch, Rollout, Signal, zero_variance
from holdfast.run import journal
from holdfast.run.manifest import is_committed
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import span

_log = logging.getLogger("orchestrator")


class BatchPublisher:
    """Writes one batch at a time to the journal (`rollouts/step_N`), on a thread, while the next one is generated.

    Batch N is visible before batch N + 1 begins to be written. Use as an async context manager."""

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
        if self._pending is not None:
            await asyncio.wait([self._pending])
            if error is not None and not self._pending.cancelled():
                self._pending.exception()  # so that asyncio does not report it as never retrieved; `error` came first
        self._thread.shutdown()

    async def submit(self, batch: Batch, state: bytes) -> None:
        """Publish `batch` after the batch before; raises RunDirError if the batch before could not be published."""
        await self.settle()
        self._pending = asyncio.get_running_loop().run_in_executor(self._thread, self._publish, batch, state)

    async def settle(self) -> None:
        """Wait until everything submitted is published. Raises RunDirError if that failed."""
        if self._pending is not None:
            # Shielded: if this wait is cancelled, __aexit__ must still find the write to wait for.
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
        # After the batch is durable: until then only the log has its answers.
        discard_generations(self._run_dir, up_to=batch.step)


@dataclass(eq=False)
class BatchPipeline:
    """Makes batches and hands them to the publisher, which writes one while the next one is generated."""

    config: OrchestratorConfig
    _: KW_ONLY
    client: InferenceClient
    publisher: BatchPublisher
    pusher: WeightPusher
    maker: BatchMaker
    evaluation: PolicyEvaluation | None = None

    def __post_init__(self) -> None:
        self._start_period(time.perf_counter())

    def _start_period(self, now: float) -> None:
        self._ended, self._busy_s, self._counts = now, self.client.busy_s, self.client.counts()

    async def begin(self, step: int, *, version: int) -> None:
        """Make the engines serve `version` for batch `step`, and check their parity with the trainer."""
        events.report("waiting for weights", version=version)
        weights, _ = await self._get_weights(step, version)
        events.report("generating", step=step, version=weights.version)
        self._start_period(time.perf_counter())

    async def produce(self, step: int, *, version: int) -> None:
        """Make batch `step` by policy `version`, and submit it with the state after it."""
        waiting = time.perf_counter()
        weights, updating = await self._get_weights(step, version)
        generating = time.perf_counter()
        with (
            phase(f"generating batch {step}", version=weights.version),
            span("generate", step=step, version=weights.version),
        ):
            selection = await self.maker.make(step, weights)
        made = time.perf_counter()
        evaluated = await self._evaluate(weights)
        now = time.perf_counter()
        times = BatchTimes(
            period=now - self._ended,
            wait_for_weights=updating - waiting,
            update_weights=generating - updating,
            generate=made - generating,
            busy=self.client.busy_s - self._busy_s,
        )
        of_engines = [after.since(before) for after, before in zip(self.client.counts(), self._counts, strict=True)]
        self._start_period(now)
        metrics = batch_metrics(
            selection,
            times,
            step=step,
            num_reused=self.maker.num_reused,
            engines=of_engines,
            environments=self.config.environments,
            signal=self.config.signal if self.config.dynamic_sampling else None,
        )
        metrics |= self.maker.curriculum_metrics | self.maker.metrics | evaluated
        batch = Batch(
            step=step,
            policy_version=weights.version,
            weights_digest="" if self.config.is_sampled_by_teacher else weights.digest,
            older_digests=self.maker.digests,
            teacher_digest=self.maker.state.teacher_digest,
            rollouts=selection.rollouts,
            dropped=selection.dropped,
            metrics=metrics,
        )
        # The state after this batch, in the same rename as the batch.
        await self.publisher.submit(batch, self.maker.state.encode())
        _log.info(
            f"batch {step} by version {weights.version}: reward {metrics['reward/mean']:.4f}, "
            f"{metrics['rollout/tokens_mean']:.1f} tokens, {len(selection.dropped)} groups dropped, "
            f"{times.period:.2f} s (waited {times.wait_for_weights:.2f} s for weights)"
        )

    async def _evaluate(self, weights: PublishedWeights) -> dict[str, float]:
        """Evaluate the version that has just made a batch, if due; return metrics for this batch.

        The state of the same batch records the evaluation, so its numbers come with one batch, whatever is killed."""
        state, begin = self.maker.state, time.perf_counter()
        if self.evaluation is None or not self.evaluation.is_due(weights.version, after=state.evaluated_version):
            return {}
        with phase("evaluating", version=weights.version), span("evaluate", version=weights.version):
            metrics = await self.evaluation.evaluate(weights)
        state.evaluated_version = weights.version
        return metrics | {"time/evaluate": time.perf_counter() - begin}

    async def _get_weights(self, step: int, version: int) -> tuple[PublishedWeights, float]:
        """Wait for the weights, and have the engines serve them; return also when the wait was over."""
        with span("wait_for_weights", step=step, version=version), phase("waiting for weights", version=version):
            # A batch that cannot be written ends this wait: no later version comes without it.
            weights = await self.pusher.wait_for(version, check=self.publisher.check)
        waited = time.perf_counter()
        with span("update_weights", step=step, version=version):
            if not self.config.is_sampled_by_teacher:  # a teacher serves what it has
                weights = await self.pusher.serve(weights, check=self.publisher.check)
        return weights, waited


def version_for(step: int, run_dir: RunDir, *, async_level: int, trainer_step: int) -> int:
    """Return the policy version that samples batch `step`: `max(0, step - 1 - async_level)`, if it is published.

    The first batches after a resume may need versions from before the checkpoint. If such a version is gone, the
    resumed version `trainer_step` samples the batch, which then differs from an uninterrupted run."""
    # Step N trains batch N on weights N - 1.
    wanted = max(0, step - 1 - async_level)
    if wanted >= trainer_step or is_committed(run_dir.weights_of(wanted)):
        return wanted
    _log.warning(
        f"batch {step}: policy version {wanted} is no longer in {run_dir.weights}, so version {trainer_step} samples "
        "it: from here on this run differs from an uninterrupted one"
    )
    return trainer_step


@dataclass(frozen=True)
class BatchTimes:
    """The parts of the wall time of one batch, in seconds.

    `period` is the time since the end of the batch before, and `busy` its part with a request in flight."""

    period: float
    wait_for_weights: float
    update_weights: float
    generate: float
    busy: float


def batch_metrics(
    selection: Selection,
    times: BatchTimes,
    *,
    step: int,
    num_reused: int,
    engines: Sequence[EngineCounts],
    environments: Sequence[EnvironmentConfig],
    signal: Signal | None,
) -> dict[str, float]:
    """Return metrics by slash-separated name; docs/metrics.md says what each means.

    They cover every scored group, also groups that dynamic sampling dropped: how good the policy is must not depend on
    which groups are trained.

    Args:
        num_reused: turns that were sampled before a restart.
        engines: requests of each engine in the period.
        signal: of dynamic sampling; without it the trainer, which knows its advantage, counts the groups.
    """
    groups = [*selection.groups, *selection.unused]
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    sampled = [rollout.loss_mask.num_sampled for rollout in rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    metrics = {
        # Here and below fmean, which adds exactly: the order of the rollouts does not matter.
        "reward/mean": statistics.fmean(rewards),
        "reward/std": _std(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "rollout/tokens_mean": statistics.fmean(lengths),
        "rollout/tokens_max": float(max(lengths)),
        "rollout/sampled_tokens_mean": statistics.fmean(sampled),
        "rollout/truncated": statistics.fmean([rollout.truncated for rollout in rollouts]),
        "rollout/turns": statistics.fmean([rollout.loss_mask.num_stretches for rollout in rollouts]),
        "rollout/branches": statistics.fmean([len(rollout.branch_starts) for rollout in rollouts]),
        "rollout/split": statistics.fmean([len(rollout.branch_starts) > 1 for rollout in rollouts]),
        "rollout/reused_turns": float(num_reused),
        "groups/drawn": float(len(selection.groups) + len(selection.dropped)),
        "rollouts_per_s": len(rollouts) / times.period,
        "sampled_tokens_per_s": sum(sampled) / times.period,
        "time/batch": times.period,
        "time/generate": times.generate,
        "time/wait_for_weights": times.wait_for_weights,
        "time/update_weights": times.update_weights,
        "engine/idle_share": min(1.0, max(0.0, 1.0 - times.busy / times.period)),
    }
    if signal is not None:
        metrics |= zero_variance(groups, signal)
    if any(rollout.step_rewards for rollout in rollouts):
        steps = [rollout.step_rewards.rewards if rollout.step_rewards else () for rollout in rollouts]
        metrics["reward/steps_mean"] = statistics.fmean([math.fsum(own) for own in steps])
    reasons = Counter(one.reason for one in selection.dropped)
    metrics |= {f"groups/dropped/{reason}": float(reasons[reason]) for reason in DROP_REASONS}
    for number, counts in enumerate(engines):
        metrics[f"engine/{number}/requests"] = float(counts.requests)
        metrics[f"engine/{number}/failures"] = float(counts.failures)
        metrics[f"engine/{number}/in_flight"] = counts.in_flight_s / times.period
    metrics |= _staleness(rollouts, step=step)
    for settings in environments:
        if of_environment := [group for group in groups if group[0].environment == settings.label]:
            metrics |= _environment_metrics(settings, of_environment)
    return metrics


def _staleness(rollouts: Sequence[Rollout], *, step: int) -> dict[str, float]:
    """Return how many optimizer steps old the versions are that sampled the tokens."""
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        for stretch in rollout.versions:
            # Step N trains version N - 1.
            tokens[step - 1 - stretch.version] += stretch.end - stretch.start
    if not tokens:  # a teacher sampled them
        return {}
    mean = sum(age * number for age, number in tokens.items()) / tokens.total()
    return {"staleness/mean": mean, "staleness/max": float(max(tokens))}


def _environment_metrics(settings: EnvironmentConfig, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    name = settings.label
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    # `quantiles` needs two values.
    deciles = statistics.quantiles(rewards if len(rewards) > 1 else rewards * 2, n=10, method="inclusive")
    metrics = {
        f"reward/{name}/mean": statistics.fmean(rewards),
        f"reward/{name}/std": _std(rewards),
        f"reward/{name}/p10": deciles[0],
        f"reward/{name}/p50": deciles[4],
        f"reward/{name}/p90": deciles[8],
    }
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for metric, value in rollout.metrics.items():
            values.setdefault(f"{name}/{metric}", []).append(value)
    metrics |= {metric: statistics.fmean(found) for metric, found in values.items()}
    verdicts = [[is_solved(rollout, settings.success_reward) for rollout in group] for group in groups]
    if all(verdict is not None for own in verdicts for verdict in own):
        solved = [sum(map(bool, own)) for own in verdicts]
        size = len(groups[0])
        for power in range(size.bit_length()):
            k = 2**power
            metrics[f"{name}/pass@{k}"] = statistics.fmean([pass_at_k(size, number, k) for number in solved])
    return metrics


def _std(values: Sequence[float]) -> float:
    """Return the population standard deviation."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean([(value - mean) ** 2 for value in values]))
