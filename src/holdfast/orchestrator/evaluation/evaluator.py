"""Plays held-out tasks with one exact policy, and keeps every rollout."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import xxhash

from holdfast.orchestrator.evaluation.results import EvaluatedRollout, ResultsFile, Turn, read_identity
from holdfast.orchestrator.evaluation.summary import Summary, summarize
from holdfast.orchestrator.evaluation.tasks import HeldOutTasks
from holdfast.orchestrator.judges.desk import guarded
from holdfast.orchestrator.rollouts.group import Outcome, Problem, TurnSampler, is_solved
from holdfast.orchestrator.rollouts.workers import play_group
from holdfast.orchestrator.seeds import TaskSeed
from holdfast.orchestrator.task_group import run_all
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.config.environments import EnvironmentConfig
from holdfast.shared.files import durable
from holdfast.shared.files.run_dir import SUMMARY_NAME
from holdfast.shared.process.events import report
from holdfast.shared.process.heartbeat import moved
from holdfast.shared.wire.rollouts import Dropped, Rollout

_REPORTS = 10


class EvaluationSampler(TurnSampler, Protocol):
    """What samples for an evaluation, and ends it when it fails."""

    async def guard(self, work: Any) -> Any:
        """Return the result of `work`; cancelled as soon as sampling has failed."""
        ...

    async def close(self) -> None:
        """Cancel what is still in flight."""
        ...


@dataclass(frozen=True)
class Policy:
    """Who is evaluated.

    Attributes:
        identity: what tells it from all others, such as the digest of its weights.
        tokenizer: of its token ids.
    """

    identity: dict[str, object]
    tokenizer: Tokenizer


async def evaluate(
    tasks: HeldOutTasks,
    policy: Policy,
    sampler: EvaluationSampler,
    *,
    directory: Path,
    max_concurrency: int,
    confidence: float = 0.95,
    tells: bool = True,
) -> Summary:
    """Play the tasks that `directory` does not hold yet, and write `summary.json`; closes `sampler`.

    Args:
        tells: report how far it is.

    Raises:
        EnvironmentFailure: an environment raised or broke its contract, and `on_error` is `stop`.
        InferenceError: sampling failed.
        ConfigError, DataError, RunDirError: `directory` holds another evaluation, or is damaged, or cannot be written.
    """
    settings = {section.label: section for section in tasks.settings}
    seeds = tasks.seeds()
    try:
        results = ResultsFile(
            directory, {"policy": policy.identity, **tasks.identity()}, samples_per_task=tasks.samples_per_task
        )
        try:
            missing = [seed for seed in seeds if (seed.environment, seed.index) not in results.tasks]
            if tells:
                report("evaluating", tasks=len(seeds), done=len(seeds) - len(missing))
            slots = asyncio.Semaphore(max(1, max_concurrency // tasks.samples_per_task))

            async def play(seed: TaskSeed) -> None:
                section = settings[seed.environment]
                problem = Problem(tasks.environments.get(seed.environment), section, seed)
                async with slots:
                    outcome = await play_group(
                        problem,
                        0,
                        config=tasks.config,
                        tokenizer=policy.tokenizer,
                        sampler=sampler,
                        workers=tasks.workers,
                    )
                await results.append(_lines(outcome, section, policy))
                moved()
                done = len(results.tasks)
                if tells and done * _REPORTS // len(seeds) > (done - 1) * _REPORTS // len(seeds):
                    report("evaluated", tasks=f"{done}/{len(seeds)}")

            await guarded(sampler.guard(run_all(play(seed) for seed in missing)))
        finally:
            results.close()
    finally:
        await sampler.close()
    summary = summarize(results.tasks, read_identity(directory), confidence=confidence)
    durable.write_file(directory / SUMMARY_NAME, summary.encode())
    # What was sampled is in the rollouts now.
    shutil.rmtree(directory / "rollouts", ignore_errors=True)
    return summary


def _lines(outcome: Outcome, section: EnvironmentConfig, policy: Policy) -> list[EvaluatedRollout]:
    if isinstance(outcome, Dropped):
        return [
            EvaluatedRollout(
                environment=outcome.environment, task=outcome.task_id, dropped=outcome.reason, detail=outcome.detail
            )
        ]
    return [_line(rollout, section, policy) for rollout in outcome]


def _line(rollout: Rollout, section: EnvironmentConfig, policy: Policy) -> EvaluatedRollout:
    stretches = _stretches(rollout)
    return EvaluatedRollout(
        environment=rollout.environment,
        task=rollout.task_id,
        sample=rollout.sample_index,
        prompt=xxhash.xxh3_128_hexdigest(repr(stretches[0][1]).encode()),
        reward=rollout.reward,
        solved=is_solved(rollout, section.success_reward),
        truncated=rollout.truncated,
        sampled_tokens=rollout.loss_mask.num_sampled,
        metrics=rollout.metrics,
        turns=[Turn(sampled, policy.tokenizer.decode(ids, skip_special_tokens=False)) for sampled, ids in stretches],
    )


def _stretches(rollout: Rollout) -> Sequence[tuple[bool, list[int]]]:
    pairs = zip(rollout.loss_mask, rollout.token_ids, strict=True)
    return [
        (sampled, [token for _, token in stretch]) for sampled, stretch in groupby(pairs, lambda pair: bool(pair[0]))
    ]
