"""Evaluations during a run: by the engines, while they serve the version that has just made a batch.

See docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.environments import EnvironmentConfig
from holdfast.config.orchestrator import EvalConfig, EvaluationSamplingConfig, OrchestratorConfig, check_sections
from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import find_environment, is_built_in, load_environment
from holdfast.orchestrator.env.tool_loop import check_tools, tool_use_of
from holdfast.orchestrator.episodes import Sampler
from holdfast.orchestrator.evaluation.evaluator import (
    EvaluatedPolicy,
    HeldOutTasks,
    count_tasks,
    evaluate,
    group_config,
    held_out_sections,
    identity_of,
    load_environments,
    refuse_training_tasks,
    sizes_of,
)
from holdfast.orchestrator.evaluation.results import claim_directory
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.orchestrator.weight_sync import PublishedWeights
from holdfast.orchestrator.workers import Workers, starting_workers
from holdfast.process.events import report
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir

_log = logging.getLogger("orchestrator")
_KEY = "eval.environments"


class PolicyEvaluation:
    """Evaluates versions of the policy that the engines of `client` serve.

    Args:
        tasks: what is asked.
        interval: which versions are due.
        max_concurrency: most sessions in flight.
    """

    def __init__(
        self,
        tasks: HeldOutTasks,
        client: InferenceClient,
        *,
        interval: int,
        run_dir: RunDir,
        tokenizer: Tokenizer,
        max_concurrency: int,
    ) -> None:
        self._tasks = tasks
        self._client = client
        self._interval = interval
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._max_concurrency = max_concurrency

    def is_due(self, version: int, *, after: int) -> bool:
        """Whether `version` is to be evaluated, where version `after` was the last one."""
        return version > after and version % self._interval == 0

    async def evaluate(self, weights: PublishedWeights) -> dict[str, float]:
        """Return the numbers of a version that all engines serve, by name; what is done of them is not done again.

        Raises:
            EnvironmentFailure, InferenceError, RunDirError: it cannot be evaluated.
        """
        directory = self._run_dir.evaluation(weights.version)
        policy = EvaluatedPolicy(
            {"kind": "weights", "digest": weights.digest, "version": weights.version}, self._tokenizer
        )
        self._clear_others(directory, policy)
        stops = self._tokenizer.stop_token_ids
        log = GenerationLog(
            RunDir(directory),
            weights.version,
            weights_digest=weights.digest,
            stop_token_ids=stops,
            vocab_size=self._client.vocab_size,
        )
        sampler = Sampler(self._client, log, weights_digest=weights.digest, stop_token_ids=stops)
        try:
            summary = await evaluate(
                self._tasks,
                policy,
                sampler,
                directory=directory,
                max_concurrency=self._max_concurrency,
                tells=False,
            )
        finally:
            await _rest(self._tasks.workers)
        metrics = summary.metrics()
        shown = {name.removeprefix("eval/"): f"{value:.4g}" for name, value in metrics.items() if "@" in name}
        report("evaluated", version=weights.version, **shown)
        return {**metrics, "eval/version": float(weights.version)}

    def _clear_others(self, directory: Path, policy: EvaluatedPolicy) -> None:
        """Remove what is there of other weights with this number, or of other tasks: nobody goes on with it."""
        if not directory.exists():
            return
        try:
            claim_directory(directory, identity_of(policy.identity, self._tasks))
        except (ConfigError, DataError) as error:
            _log.warning("evaluated anew: %s", error)
            atomic.remove_directory(directory)


@asynccontextmanager
async def load_evaluation(
    config: OrchestratorConfig, client: InferenceClient, *, run_dir: RunDir, tokenizer: Tokenizer
) -> AsyncIterator[PolicyEvaluation | None]:
    """Give the evaluations that `config` asks for, until the end of the context; None for none.

    Raises:
        ConfigError, DataError: an environment cannot be used, or its tasks are those of training.
        EnvironmentFailure: its module or its constructor raised.
    """
    if config.eval is None:
        yield None
        return
    groups = _group_config(config, config.eval)
    environments = load_environments(groups.environments, key=_KEY)
    for section in groups.environments:
        if section.label in environments:  # what cannot be, is told before the first batch
            tool_use_of(environments[section.label], section, tokenizer)
    async with starting_workers(groups) as workers:
        tasks = _held_out(config, config.eval, groups, environments, workers)
        await _rest(workers)  # until there is something to play: their memory is worth more elsewhere
        yield PolicyEvaluation(
            tasks,
            client,
            interval=config.eval.interval,
            run_dir=run_dir,
            tokenizer=tokenizer,
            max_concurrency=config.client.max_concurrency * len(config.client.urls),
        )


async def _rest(workers: Mapping[str, Workers]) -> None:
    await asyncio.gather(*(one.rest() for one in workers.values()))


def check_evaluation(config: OrchestratorConfig) -> None:
    """Check what `load_evaluation` will load, without calling a constructor of the user's own.

    Raises:
        ConfigError, DataError: what cannot be used.
        EnvironmentFailure: a module raised.
    """
    assert config.eval is not None, "there is something to check"
    built_in: dict[str, Environment] = {}
    sections = _sections(config, config.eval)
    for position, section in enumerate(sections):
        key = f"{_KEY}[{position}]"
        if is_built_in(section.id):
            built_in[section.label] = load_environment(section, key=key)
        else:
            find_environment(section, key=key)
    check_tools(built_in, sections, tokenizer_name=config.model.tokenizer_name)
    groups = _group_config(config, config.eval)
    there = [section for section in sections if section.label in built_in]
    _held_out(config, config.eval, groups.model_copy(update={"environments": there}), built_in, {})


def _sections(config: OrchestratorConfig, settings: EvalConfig) -> list[EnvironmentConfig]:
    """Return the environments of an evaluation.

    Raises:
        ConfigError: one has longer rollouts than engines and trainer have room for.
    """
    if settings.environments is None:
        takes_max_tokens = settings.sampling is None
        return held_out_sections(config.environments, seq_len=config.seq_len, takes_max_tokens=takes_max_tokens)
    try:
        check_sections(settings.environments, seq_len=config.seq_len)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from None
    return settings.environments


def _sampling(config: OrchestratorConfig, settings: EvalConfig) -> EvaluationSamplingConfig:
    return settings.sampling or EvaluationSamplingConfig(max_tokens=config.sampling.max_tokens)


def _group_config(config: OrchestratorConfig, settings: EvalConfig) -> OrchestratorConfig:
    return group_config(
        config,
        _sections(config, settings),
        samples_per_task=settings.samples_per_task,
        seq_len=config.seq_len,
        sampling=_sampling(config, settings),
    )


def _held_out(
    config: OrchestratorConfig,
    settings: EvalConfig,
    groups: OrchestratorConfig,
    environments: dict[str, Environment],
    workers: Mapping[str, Workers],
) -> HeldOutTasks:
    sizes = sizes_of(environments, workers)
    refuse_training_tasks(sizes, groups.environments, config.environments, key=_KEY)
    return HeldOutTasks(
        config=groups,
        environments=environments,
        workers=workers,
        counts=count_tasks(sizes, settings.num_tasks, key="eval.num_tasks"),
        seed=settings.seed,
        sampling=_sampling(config, settings),
    )
