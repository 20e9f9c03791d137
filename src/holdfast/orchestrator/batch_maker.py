"""Makes one batch: draws tasks, runs their prompt groups, selects groups for the batch, advances the counters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import EnvironmentFailure
from holdfast.orchestrator.client.client import Affinity, InferenceClient
from holdfast.orchestrator.curriculum import advance, curriculum_metrics, draw_level, next_environment
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.episodes import Outcome, Problem, Sampler
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.orchestrator.judge_client import guarded
from holdfast.orchestrator.state import EnvironmentState, OrchestratorState, TaskSeed
from holdfast.orchestrator.tasks import SessionSlots, run_all
from holdfast.orchestrator.teacher import Teacher
from holdfast.orchestrator.weight_sync import PublishedWeights
from holdfast.orchestrator.workers import Workers, play_group
from holdfast.protocol.rollouts import Dropped, Rollout, Signal, has_signal
from holdfast.run.journal import Counts, dropped_by_reason
from holdfast.run.run_dir import RunDir

_log = logging.getLogger("orchestrator")


@dataclass(frozen=True)
class Selection:
    """The groups of a batch; `unused` groups without signal; one `dropped` entry per problem that is not in the batch.

    All are in the order of the draw.
    """

    groups: list[list[Rollout]]
    unused: list[list[Rollout]]
    dropped: list[Dropped]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]


def select(outcomes: Sequence[Outcome], *, num_groups: int, signal: Signal) -> Selection:
    """Return at most `num_groups` groups: those with signal first, then the earliest of the others."""
    candidates = [place for place, outcome in enumerate(outcomes) if not isinstance(outcome, Dropped)]
    # sorted is stable: among equals the order of the draw stays.
    chosen = set(sorted(candidates, key=lambda place: not has_signal(outcomes[place], signal))[:num_groups])
    groups: list[list[Rollout]] = []
    unused: list[list[Rollout]] = []
    dropped: list[Dropped] = []
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, Dropped):
            dropped.append(outcome)
        elif place in chosen:
            groups.append(outcome)
        else:
            unused.append(outcome)
            dropped.append(_without_signal(outcome))
    return Selection(groups, unused, dropped)


def _without_signal(group: Sequence[Rollout]) -> Dropped:
    return Dropped(
        environment=group[0].environment,
        task_id=group[0].task_id,
        reason="zero_signal",
        rollouts=len(group),
        tokens=sum(len(rollout.token_ids) for rollout in group),
    )


def count(state: OrchestratorState, step: int, selection: Selection) -> None:
    """Move the counters of `state` on to batch `step`."""
    rollouts, dropped = selection.rollouts, selection.dropped
    state.step = step
    state.problems += len(selection.groups) + len(dropped)
    state.rollouts += len(rollouts) + sum(one.rollouts for one in dropped)
    state.tokens += sum(len(one.token_ids) for one in rollouts) + sum(one.tokens for one in dropped)
    state.sampled_tokens += sum(one.loss_mask.num_sampled for one in rollouts)
    for reason, counts in dropped_by_reason(dropped).items():
        state.dropped[reason] = state.dropped.get(reason, Counts()) + counts


class BatchMaker:
    """Generates the rollouts of one batch after another; `state` always belongs to the last whole batch.

    Args:
        client: of the servers that sample, which are the policy's or the teacher's.
        environments: those that are played in this process, by name, each at every level of its curriculum.
        workers: of the other environments, by name.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        client: InferenceClient,
        *,
        run_dir: RunDir,
        tokenizer: Tokenizer,
        environments: Mapping[str, Sequence[Environment]],
        state: OrchestratorState,
        teacher: Teacher | None = None,
        workers: Mapping[str, Workers] | None = None,
    ) -> None:
        self._config = config
        self._workers = workers or {}
        self._client = client
        self._teacher = teacher
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._environments = environments
        self._settings = {section.label: section for section in config.environments}
        self.state = state
        self.num_reused = 0
        self.curriculum_metrics: dict[str, float] = {}

    async def make(self, step: int, weights: PublishedWeights) -> Selection:
        """Return the groups of batch `step`, sampled by `weights`.

        Problems are drawn in rounds. The first round is the batch. With dynamic sampling each later round has as many
        problems as groups still miss a signal, until there are enough, or the limit of draws is reached; groups without
        signal fill the rest. A round begins when the round before has ended, so the draw depends on rewards, never on
        timing.

        Raises EnvironmentFailure if an environment failed and `on_error` is `stop`, or no group is left; InferenceError
        if an engine failed.
        """
        # A copy: a batch that fails leaves the state after the last whole one.
        state = self.state.copy()
        log = self._open_log(step, weights)
        sampler = self._sampler(log, weights)
        teacher = None if self._config.is_sampled_by_teacher else self._teacher
        most = self._config.client.max_concurrency * len(self._client.engines)
        slots = SessionSlots(max(most, self._config.largest_group))

        async def run_one(problem: Problem) -> Outcome:
            async with slots.taking(self._config.rollouts_of(problem.settings).group_size):
                outcome = await play_group(
                    problem,
                    step,
                    config=self._config,
                    tokenizer=self._tokenizer,
                    sampler=sampler,
                    workers=self._workers,
                )
            if teacher is not None and not isinstance(outcome, Dropped):
                affinity = Affinity()
                await run_all(teacher.judge(rollout, log, affinity=affinity) for rollout in outcome)
            return outcome

        outcomes: list[Outcome] = []
        try:
            while missing := self._num_missing(outcomes):
                problems = self._choose_problems(state, missing)
                # In the order of the draw, whichever group ends first.
                outcomes += await guarded(sampler.guard(run_all(run_one(problem) for problem in problems)))
        finally:
            await sampler.close()
        selection = select(outcomes, num_groups=self._config.problems_per_step, signal=self._config.signal)
        self._check(step, selection)
        count(state, step, selection)
        # Behind the draw of the whole batch, dropped groups too, so that a level changes between batches alone.
        advance(state, self._config, outcomes)
        scored = [outcome for outcome in outcomes if not isinstance(outcome, Dropped)]
        self.curriculum_metrics = curriculum_metrics(state, self._config, scored)
        self.state = state
        self.num_reused = sampler.num_reused
        return selection

    def _num_missing(self, outcomes: Sequence[Outcome]) -> int:
        missing = self._config.problems_per_step - sum(has_signal(one, self._config.signal) for one in outcomes)
        return min(missing, self._config.max_problems_per_step - len(outcomes))

    def _check(self, step: int, selection: Selection) -> None:
        dropped = selection.dropped
        if not selection.groups:
            reasons = ", ".join(
                f"{number} {reason}" for reason, number in Counter(one.reason for one in dropped).items()
            )
            raise EnvironmentFailure(
                f"batch {step}: all {len(dropped)} groups were dropped ({reasons}), so there is nothing to train on. "
                f"The first: {dropped[0].detail}"
            )
        num_equal = sum(not has_signal(group, self._config.signal) for group in selection.groups)
        if self._config.dynamic_sampling and num_equal:
            _log.warning(
                "batch %d: %d of its %d groups have no signal after %d problems, the most that may be drawn for it",
                step,
                num_equal,
                len(selection.groups),
                len(selection.groups) + len(dropped),
            )

    def _choose_problems(self, state: OrchestratorState, number: int) -> list[Problem]:
        problems = []
        for _ in range(number):
            name = next_environment(state)
            seed, task_id = self._next_task(state.environments[name], name)
            levels = self._environments.get(name)
            environment = levels[seed.level or 0] if levels is not None else None
            problems.append(Problem(environment, self._settings[name], seed, number=task_id))
        return problems

    def _next_task(self, position: EnvironmentState, name: str) -> tuple[TaskSeed, int]:
        """Return the seed of the environment's next task, and its position among all tasks; moves `position` on."""
        task_id, seed = position.next_task, self._config.seed
        # Moved on by every draw, also of groups that are dropped: no task comes twice.
        position.next_task += 1
        settings = self._settings[name].curriculum
        if settings is None or position.curriculum is None:
            return TaskSeed(seed, name, task_id), task_id
        number = draw_level(position.curriculum, settings, task_id=task_id, seed=seed, name=name)
        level = position.curriculum.levels[number]
        level.next_task += 1
        return TaskSeed(seed, name, level.next_task - 1, level=number), task_id

    def _open_log(self, step: int, weights: PublishedWeights) -> GenerationLog:
        return GenerationLog(
            self._run_dir,
            step,
            weights_digest=self._sampling_digest(weights),
            stop_token_ids=self._tokenizer.stop_token_ids,
            teacher_digest=self._teacher.digest if self._teacher else "",
            vocab_size=self._client.vocab_size,
        )

    def _sampler(self, log: GenerationLog, weights: PublishedWeights) -> Sampler:
        return Sampler(
            self._client,
            log,
            weights_digest=self._sampling_digest(weights),
            stop_token_ids=self._tokenizer.stop_token_ids,
        )

    def _sampling_digest(self, weights: PublishedWeights) -> str:
        if self._config.is_sampled_by_teacher and self._teacher is not None:
            return self._teacher.digest
        return weights.digest
