"""Plays held-out tasks with one exact policy and keeps every rollout; refuses tasks that the run trains on."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import xxhash

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.environments import EnvironmentConfig, EnvironmentSamplingConfig, SamplingConfig
from holdfast.config.load import read_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import load_environment
from holdfast.orchestrator.env.verifiers import PREFIX as VERIFIERS
from holdfast.orchestrator.episodes import Outcome, Problem, TurnSampler, is_solved
from holdfast.orchestrator.evaluation.results import EvaluatedRollout, ResultsFile, Turn, read_identity
from holdfast.orchestrator.evaluation.statistics import Summary, summarize
from holdfast.orchestrator.judge_client import guarded
from holdfast.orchestrator.state import TaskSeed
from holdfast.orchestrator.tasks import run_all
from holdfast.orchestrator.workers import Workers, play_group
from holdfast.process.events import report
from holdfast.process.heartbeat import moved
from holdfast.protocol.rollouts import Dropped, Rollout
from holdfast.run import atomic
from holdfast.run.manifest import content_digest, library_versions
from holdfast.run.run_dir import SUMMARY_NAME, RunDir
from holdfast.run.settings import files_of_environment

_NUM_TASKS = 128
"""Of an environment without an end, where nothing is said."""


@dataclass(frozen=True)
class HeldOutTasks:
    """The tasks of an evaluation.

    Attributes:
        config: how groups are played, see `group_config`.
        environments: by name, those that are played in this process.
        workers: by the name of their environment, those that play the others.
        counts: tasks of each, by name.
        seed: that the seeds of the tasks are made of, beside the name of the environment.
        sampling: how completions are sampled, as far as an environment has no settings of its own.
    """

    config: OrchestratorConfig
    environments: Mapping[str, Environment]
    workers: Mapping[str, Workers]
    counts: Mapping[str, int]
    seed: int
    sampling: SamplingConfig

    @property
    def settings(self) -> Sequence[EnvironmentConfig]:
        """Of each environment, in the order of the configuration."""
        return self.config.environments

    @property
    def samples_per_task(self) -> int:
        """Rollouts of each task."""
        return self.config.group_size

    def seeds(self) -> list[TaskSeed]:
        """Return the seeds of all tasks, environment by environment."""
        return [
            TaskSeed(self.seed, section.label, index, held_out=True)
            for section in self.settings
            for index in range(self.counts[section.label])
        ]

    def identity(self) -> dict[str, object]:
        """Return all that the rollouts depend on but the policy, as plain values."""
        return {
            "seed": self.seed,
            "samples_per_task": self.samples_per_task,
            "sampling": self.sampling.model_dump(mode="json"),
            "seq_len": self.config.seq_len,
            "environments": {
                section.label: {
                    "id": section.id,
                    "args": section.model_dump(mode="json")["args"],
                    "success_reward": section.success_reward,
                    "num_tasks": self.counts[section.label],
                    "max_turns": section.max_turns,
                    "tool_parser": section.tool_parser,
                    "history": section.history,
                    "max_branches": section.max_branches,
                    **section.model_dump(mode="json", include={"sampling", "seq_len"}, exclude_none=True),
                    "mcp_servers": section.model_dump(mode="json")["mcp_servers"],
                    "files": files_of(section),
                }
                for section in self.settings
            },
        }


def group_config(
    base: OrchestratorConfig,
    settings: Sequence[EnvironmentConfig],
    *,
    samples_per_task: int,
    seq_len: int,
    sampling: SamplingConfig,
) -> OrchestratorConfig:
    """Return how groups of held-out tasks are played, here or by workers: `base` with other environments and sizes."""
    changes = {
        "environments": list(settings),
        "group_size": samples_per_task,
        "seq_len": seq_len,
        "sampling": sampling,
        "eval": None,
    }
    return base.model_copy(update=changes)


def held_out_sections(
    trained: Sequence[EnvironmentConfig], *, seq_len: int, takes_max_tokens: bool
) -> list[EnvironmentConfig]:
    """Return the environments of training as an evaluation asks them: without what says how training samples.

    Args:
        seq_len: of the evaluation; what an environment has of its own is at most that.
        takes_max_tokens: whether the `max_tokens` of each environment stays, as nobody says otherwise.
    """
    sections = []
    for section in trained:
        own = section.sampling.max_tokens if section.sampling is not None and takes_max_tokens else None
        sampling = EnvironmentSamplingConfig(max_tokens=own) if own is not None else None
        own_len = min(section.seq_len, seq_len) if section.seq_len is not None else None
        changes = {"group_size": None, "sampling": sampling, "seq_len": own_len, "curriculum": None}
        sections.append(section.model_copy(update=changes))
    return sections


def load_environments(settings: Sequence[EnvironmentConfig], *, key: str) -> dict[str, Environment]:
    """Return those that are played in this process, by name.

    Raises:
        ConfigError, DataError: one, its arguments or its data cannot be used.
        EnvironmentFailure: its module or its constructor raised.
    """
    return {
        section.label: load_environment(section, key=f"{key}[{position}]")
        for position, section in enumerate(settings)
        if not section.workers
    }


def sizes_of(environments: Mapping[str, Environment], workers: Mapping[str, Workers]) -> dict[str, int | None]:
    """Return how many tasks each environment has, None where they have no end, wherever it is played."""
    return {name: environment.num_tasks for name, environment in environments.items()} | {
        name: there.num_tasks for name, there in workers.items()
    }


def count_tasks(sizes: Mapping[str, int | None], wanted: int | None, *, key: str) -> dict[str, int]:
    """Return how many tasks of each environment are asked.

    Args:
        sizes: how many there are of each.
        wanted: of each; None: all of one that has a certain number, else 128.
        key: dotted key of `wanted`, for errors.

    Raises:
        ConfigError: one has fewer: the same task would count several times.
    """
    counts = {}
    for name, there in sizes.items():
        if wanted is not None and there is not None and wanted > there:
            raise ConfigError(
                f"{key} = {wanted}, and environment '{name}' has {there} tasks: some would count twice. Lower it, or "
                "leave it out to take them all."
            )
        counts[name] = wanted or there or _NUM_TASKS
    return counts


def refuse_training_tasks(
    sizes: Mapping[str, int | None],
    settings: Sequence[EnvironmentConfig],
    trained: Sequence[EnvironmentConfig],
    *,
    key: str,
) -> None:
    """Refuse an environment with a certain number of tasks that training draws from as well: no seed holds them out.

    Args:
        sizes: how many tasks there are of each of `settings`.
        trained: the environments of training.
        key: dotted key of the evaluation's environments, for errors.

    Raises:
        ConfigError: there is one.
    """
    drawn = [level for one in trained for level in one.at_levels("").values()]
    for section in settings:
        there = sizes[section.label]
        if there is not None and any(_are_the_same(section, one) for one in drawn):
            raise ConfigError(
                f"{key}: '{section.label}' has {there} tasks, and training draws them all: nothing of it is held out. "
                f"Name others with {key}, such as a file of questions that is not trained on."
            )


def _are_the_same(one: EnvironmentConfig, other: EnvironmentConfig) -> bool:
    """Whether two environments have the same tasks: by their arguments, or by a file that both read."""
    return one.id == other.id and (one.args == other.args or not _files(one).isdisjoint(_files(other)))


def _files(section: EnvironmentConfig) -> set[str]:
    """Return the files with tasks that its arguments name, each in one spelling."""
    interpreter = "python" if section.id.startswith(VERIFIERS) else None
    texts = [value for name, value in section.args.items() if isinstance(value, str) and name != interpreter]
    return {os.path.realpath(text) for text in texts if os.path.isfile(text)}  # noqa: PTH113 - whatever the text is


def settings_of_run(run: Path) -> OrchestratorConfig | None:
    """Return how the newest attempt of an RL run makes its rollouts; None of a run of another program.

    Raises:
        ConfigError: its settings cannot be read.
    """
    run_dir = RunDir(run)
    for attempt in range(run_dir.next_attempt() - 1, 0, -1):
        path = run_dir.configs(attempt) / "orchestrator.toml"
        if path.exists():
            return read_toml(OrchestratorConfig, path)
    return None


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
class EvaluatedPolicy:
    """Who is evaluated.

    Attributes:
        identity: what tells it from all others, such as the digest of its weights.
        tokenizer: of its token ids.
    """

    identity: dict[str, object]
    tokenizer: Tokenizer


def files_of(section: EnvironmentConfig) -> dict[str, str]:
    """Return digests of the files that the settings of an environment name, by where they name them."""
    return {key: content_digest(path) for key, path in files_of_environment(section).items()}


def identity_of(policy: Mapping[str, object], tasks: HeldOutTasks) -> dict[str, object]:
    """Return all that the rollouts of an evaluation depend on, as plain values; `policy` tells it from others."""
    return {"policy": policy, "libraries": library_versions(), **tasks.identity()}


async def evaluate(
    tasks: HeldOutTasks,
    policy: EvaluatedPolicy,
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
        results = ResultsFile(directory, identity_of(policy.identity, tasks), samples_per_task=tasks.samples_per_task)
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
    # What was sampled is in the rollouts now. Before the summary: behind it no start looks for the rest of a removal.
    shutil.rmtree(directory / "rollouts", ignore_errors=True)
    atomic.write_file(directory / SUMMARY_NAME, summary.encode())
    return summary


def _lines(outcome: Outcome, section: EnvironmentConfig, policy: EvaluatedPolicy) -> list[EvaluatedRollout]:
    if isinstance(outcome, Dropped):
        return [
            EvaluatedRollout(
                environment=outcome.environment, task=outcome.task_id, dropped=outcome.reason, detail=outcome.detail
            )
        ]
    return [_line(rollout, section, policy) for rollout in outcome]


def _line(rollout: Rollout, section: EnvironmentConfig, policy: EvaluatedPolicy) -> EvaluatedRollout:
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
