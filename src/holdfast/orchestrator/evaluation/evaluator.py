"""Plays held-out tasks with one exact policy, for `evaluate` and during a run; refuses tasks that are trained on."""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, closing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import xxhash

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.environments import EnvironmentConfig, EnvironmentSamplingConfig
from holdfast.config.load import read_toml
from holdfast.config.marks import Mark, marked
from holdfast.config.orchestrator import EvalConfig, EvaluationSamplingConfig, OrchestratorConfig, check_sections
from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import load_environment
from holdfast.orchestrator.env.tool_loop import tool_use_of
from holdfast.orchestrator.env.verifiers import VERIFIERS
from holdfast.orchestrator.episodes import Outcome, Problem, Sampler, is_solved
from holdfast.orchestrator.evaluation.results import EvaluatedRollout, ResultsFile, Turn, claim_directory, read_identity
from holdfast.orchestrator.evaluation.statistics import Summary, summarize
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.orchestrator.group_players import GroupPlayer, Workers, starting_workers
from holdfast.orchestrator.judge_client import guarded
from holdfast.orchestrator.state import TaskSeed
from holdfast.orchestrator.tasks import run_all
from holdfast.orchestrator.weight_sync import PublishedWeights
from holdfast.process.events import report
from holdfast.process.heartbeat import moved
from holdfast.protocol.rollouts import Dropped, Rollout
from holdfast.run import atomic
from holdfast.run.manifest import content_digest, library_versions
from holdfast.run.run_dir import SUMMARY_NAME, RunDir
from holdfast.run.settings import files_of_environment

_log = logging.getLogger("orchestrator")
_NUM_TASKS = 128
"""Default number of tasks of an environment without an end."""
EVAL_KEY = "eval.environments"


@dataclass(frozen=True)
class HeldOutTasks:
    """The tasks of an evaluation.

    Attributes:
        config: how groups are played: a run's, with other environments and sizes.
        environments: played in this process, by name.
        workers: of the other environments, by name.
        counts: tasks of each environment, by name.
        seed: of the tasks' seeds, with the name of the environment.
    """

    config: OrchestratorConfig
    environments: Mapping[str, Environment]
    workers: Mapping[str, Workers]
    counts: Mapping[str, int]
    seed: int

    def seeds(self) -> list[TaskSeed]:
        """Return the seeds of all tasks, environment by environment."""
        return [
            TaskSeed(self.seed, section.label, index, held_out=True)
            for section in self.config.environments
            for index in range(self.counts[section.label])
        ]

    def identity(self, policy: Mapping[str, object]) -> dict[str, object]:
        """Return everything that the rollouts of `policy` depend on, as plain values."""
        decides = set(marked(EnvironmentConfig, Mark.ANSWERS))
        return {
            "policy": policy,
            "libraries": library_versions(),
            "seed": self.seed,
            "samples_per_task": self.config.group_size,
            "sampling": self.config.sampling.model_dump(mode="json"),
            "seq_len": self.config.seq_len,
            "environments": {
                section.label: {
                    **section.model_dump(mode="json", include=decides, exclude_none=True),
                    "num_tasks": self.counts[section.label],
                    "files": files_of(section),
                }
                for section in self.config.environments
            },
        }


TURN_ENDS = frozenset({"max_tokens", "stop"})
"""Settings of the sampling of training that evaluations take over unless they set them."""


def held_out_sections(
    trained: Sequence[EnvironmentConfig], *, seq_len: int, takes: Set[str]
) -> list[EnvironmentConfig]:
    """Return the environments of training for an evaluation, without the settings of how training samples.

    Args:
        seq_len: of the evaluation, which no environment exceeds.
        takes: settings of each environment's sampling that stay.
    """
    sections = []
    for section in trained:
        own = section.sampling.model_dump(include={*takes}, exclude_none=True) if section.sampling is not None else {}
        sampling = EnvironmentSamplingConfig(**own) if own else None
        own_len = min(section.seq_len, seq_len) if section.seq_len is not None else None
        changes = {"group_size": None, "sampling": sampling, "seq_len": own_len, "curriculum": None}
        sections.append(section.model_copy(update=changes))
    return sections


def load_environments(settings: Sequence[EnvironmentConfig], *, key: str) -> dict[str, Environment]:
    """Return the environments that are played in this process, by name."""
    return {
        section.label: load_environment(section, key=f"{key}[{position}]")
        for position, section in enumerate(settings)
        if not section.workers
    }


def sizes_of(environments: Mapping[str, Environment], workers: Mapping[str, Workers]) -> dict[str, int | None]:
    """Return the number of tasks of each environment; None: no end."""
    return {name: environment.num_tasks for name, environment in environments.items()} | {
        name: there.num_tasks for name, there in workers.items()
    }


def count_tasks(sizes: Mapping[str, int | None], wanted: int | None, *, key: str) -> dict[str, int]:
    """Return how many tasks of each environment are played: `wanted` (setting `key`), all, or 128 without an end.

    Raises ConfigError if an environment has fewer: the same task would count several times."""
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
    """Refuse an environment of limited size from which training draws too: no seed holds its tasks out."""
    drawn = [level for one in trained for level in one.at_levels("").values()]
    for section in settings:
        there = sizes[section.label]
        if there is not None and any(_are_the_same(section, one) for one in drawn):
            raise ConfigError(
                f"{key}: '{section.label}' has {there} tasks, and training draws them all: none is held out. "
                f"Name others with {key}, such as a file of questions that is not trained on."
            )


def _are_the_same(one: EnvironmentConfig, other: EnvironmentConfig) -> bool:
    return one.id == other.id and (one.args == other.args or not _files(one).isdisjoint(_files(other)))


def _files(section: EnvironmentConfig) -> set[str]:
    """Return the real paths of the files that the arguments of an environment name."""
    interpreter = "python" if section.id.startswith(VERIFIERS) else None
    texts = [value for name, value in section.args.items() if isinstance(value, str) and name != interpreter]
    return {os.path.realpath(text) for text in texts if os.path.isfile(text)}  # noqa: PTH113 - whatever the text is


def settings_of_run(run: Path) -> OrchestratorConfig | None:
    """Return how the newest attempt of an RL run makes its rollouts; None for a run of another program."""
    run_dir = RunDir(run)
    for attempt in range(run_dir.next_attempt() - 1, 0, -1):
        path = run_dir.configs(attempt) / "orchestrator.toml"
        if path.exists():
            return read_toml(OrchestratorConfig, path)
    return None


_REPORTS = 10


def files_of(section: EnvironmentConfig) -> dict[str, str]:
    """Return digests of the files that the settings of an environment name, by their keys."""
    return {key: content_digest(path) for key, path in files_of_environment(section).items()}


async def evaluate(
    tasks: HeldOutTasks,
    policy: Mapping[str, object],
    client: InferenceClient,
    *,
    tokenizer: Tokenizer,
    directory: Path,
    max_concurrency: int,
    confidence: float = 0.95,
    tells: bool = True,
) -> Summary:
    """Play the tasks that `directory` does not have yet, and write `summary.json`.

    Args:
        policy: what identifies it, with the `digest` of its weights.
        tells: report the progress.

    Raises ConfigError, DataError or RunDirError if `directory` holds another evaluation, is damaged, or unwritable.
    """
    seeds = tasks.seeds()
    with closing(ResultsFile(directory, tasks.identity(policy), samples_per_task=tasks.config.group_size)) as results:
        missing = [seed for seed in seeds if (seed.environment, seed.index) not in results.tasks]
        if tells:
            report("evaluating", tasks=len(seeds), done=len(seeds) - len(missing))
        if missing:
            log = GenerationLog(
                RunDir(directory),
                0,
                weights_digest=str(policy["digest"]),
                stop_token_ids=tokenizer.stop_token_ids,
                vocab_size=client.vocab_size,
            )
            sampler = Sampler(client, log)
            try:
                await _play(missing, tasks, sampler, results, tokenizer, max_concurrency=max_concurrency, tells=tells)
            finally:
                await sampler.close()
    summary = summarize(results.tasks, read_identity(directory), confidence=confidence)
    # The log of generations. Before the summary: no start finishes a removal after it.
    shutil.rmtree(directory / "rollouts", ignore_errors=True)
    atomic.write_file(directory / SUMMARY_NAME, summary.encode())
    return summary


async def _play(
    missing: Sequence[TaskSeed],
    tasks: HeldOutTasks,
    sampler: Sampler,
    results: ResultsFile,
    tokenizer: Tokenizer,
    *,
    max_concurrency: int,
    tells: bool,
) -> None:
    settings = {section.label: section for section in tasks.config.environments}
    number = sum(tasks.counts.values())
    player = GroupPlayer(tasks.config, tokenizer, sampler, tasks.workers)
    slots = asyncio.Semaphore(max(1, max_concurrency // tasks.config.group_size))

    async def play(seed: TaskSeed) -> None:
        section = settings[seed.environment]
        problem = Problem(tasks.environments.get(seed.environment), section, seed)
        async with slots:
            outcome = await player.play(problem, 0)
        await results.append(_lines(outcome, section, tokenizer))
        moved()
        done = len(results.tasks)
        if tells and done * _REPORTS // number > (done - 1) * _REPORTS // number:
            report("evaluated", tasks=f"{done}/{number}")

    await guarded(sampler.failure.guard(run_all(play(seed) for seed in missing)))


def _lines(outcome: Outcome, section: EnvironmentConfig, tokenizer: Tokenizer) -> list[EvaluatedRollout]:
    if not isinstance(outcome, Dropped):
        return [_line(rollout, section, tokenizer) for rollout in outcome]
    return [
        EvaluatedRollout(
            environment=outcome.environment, task=outcome.task_id, dropped=outcome.reason, detail=outcome.detail
        )
    ]


def _line(rollout: Rollout, section: EnvironmentConfig, tokenizer: Tokenizer) -> EvaluatedRollout:
    stretches = rollout.stretches()
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
        turns=[Turn(sampled, tokenizer.decode(ids, skip_special_tokens=False)) for sampled, ids in stretches],
    )


@dataclass(eq=False)
class PolicyEvaluation:
    """Evaluates the policy version that has just made a batch, while the engines of `client` still serve it."""

    tasks: HeldOutTasks
    client: InferenceClient
    _: KW_ONLY
    interval: int
    run_dir: RunDir
    tokenizer: Tokenizer
    max_concurrency: int

    def is_due(self, version: int, *, after: int) -> bool:
        """Whether `version` is to be evaluated, after version `after`."""
        return version > after and version % self.interval == 0

    async def evaluate(self, weights: PublishedWeights) -> dict[str, float]:
        """Return the metrics of the served version `weights`; finished tasks are not played again."""
        directory = self.run_dir.evaluation(weights.version)
        policy: dict[str, object] = {"kind": "weights", "digest": weights.digest, "version": weights.version}
        self._clear_others(directory, policy)
        try:
            summary = await evaluate(
                self.tasks,
                policy,
                self.client,
                tokenizer=self.tokenizer,
                directory=directory,
                max_concurrency=self.max_concurrency,
                tells=False,
            )
        finally:
            await rest(self.tasks.workers)
        metrics = summary.metrics()
        shown = {name.removeprefix("eval/"): f"{value:.4g}" for name, value in metrics.items() if "@" in name}
        report("evaluated", version=weights.version, **shown)
        return {**metrics, "eval/version": float(weights.version)}

    def _clear_others(self, directory: Path, policy: dict[str, object]) -> None:
        """Remove an evaluation of other weights with this number, or of other tasks."""
        if not directory.exists():
            return
        try:
            claim_directory(directory, self.tasks.identity(policy))
        except (ConfigError, DataError) as error:
            _log.warning("evaluated again: %s", error)
            atomic.remove_directory(directory)


@asynccontextmanager
async def load_evaluation(
    config: OrchestratorConfig, client: InferenceClient, *, run_dir: RunDir, tokenizer: Tokenizer
) -> AsyncIterator[PolicyEvaluation | None]:
    """Give the evaluations that `config` asks for, until the end of the context; None for none."""
    if config.eval is None:
        yield None
        return
    groups = eval_groups(config, config.eval)
    environments = load_environments(groups.environments, key=EVAL_KEY)
    for section in groups.environments:
        if section.label in environments:  # errors come before the first batch
            tool_use_of(environments[section.label], section, tokenizer)
    async with starting_workers(groups) as workers:
        tasks = held_out_tasks(config, config.eval, groups, environments, workers)
        await rest(workers)
        yield PolicyEvaluation(
            tasks,
            client,
            interval=config.eval.interval,
            run_dir=run_dir,
            tokenizer=tokenizer,
            max_concurrency=config.client.max_concurrency * len(config.client.urls),
        )


async def rest(workers: Mapping[str, Workers]) -> None:
    """End the processes of `workers` until they play again, to free their memory."""
    await asyncio.gather(*(one.rest() for one in workers.values()))


def eval_groups(config: OrchestratorConfig, settings: EvalConfig) -> OrchestratorConfig:
    """Return how the groups of an evaluation during a run are played.

    Raises ConfigError if an environment has longer rollouts than engines and trainer have room for."""
    sections = settings.environments
    if sections is None:
        takes = TURN_ENDS if settings.sampling is None else frozenset[str]()
        sections = held_out_sections(config.environments, seq_len=config.seq_len, takes=takes)
    else:
        try:
            check_sections(sections, seq_len=config.seq_len)
        except ValueError as error:
            raise ConfigError(f"{EVAL_KEY}: {error}") from None
    sampling = settings.sampling or EvaluationSamplingConfig(**config.sampling.model_dump(include={*TURN_ENDS}))
    changes = {"environments": list(sections), "group_size": settings.samples_per_task, "sampling": sampling}
    return config.model_copy(update={**changes, "eval": None})


def held_out_tasks(
    config: OrchestratorConfig,
    settings: EvalConfig,
    groups: OrchestratorConfig,
    environments: Mapping[str, Environment],
    workers: Mapping[str, Workers],
) -> HeldOutTasks:
    """Return the tasks of an evaluation during a run. Raises ConfigError if training draws them, or there are fewer."""
    sizes = sizes_of(environments, workers)
    refuse_training_tasks(sizes, groups.environments, config.environments, key=EVAL_KEY)
    counts = count_tasks(sizes, settings.num_tasks, key="eval.num_tasks")
    return HeldOutTasks(config=groups, environments=environments, workers=workers, counts=counts, seed=settings.seed)
