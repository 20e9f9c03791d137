"""Makes one batch: draws tasks, runs their prompt groups, selects groups, and advances the counters.

The mix chooses the environment of a task, and the curriculum its level. Both depend only on the state after the batch
before, never on timing, workers or kills, and resume from counters.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from math import gcd, lcm
from statistics import fmean

import msgspec
import xxhash

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import EnvironmentFailure
from holdfast.orchestrator.client.client import Affinity, InferenceClient
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.episodes import Outcome, Problem, Sampler
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.orchestrator.group_players import GroupPlayer, Workers
from holdfast.orchestrator.judge_client import guarded
from holdfast.orchestrator.state import CurriculumState, EnvironmentState, LevelState, OrchestratorState, TaskSeed
from holdfast.orchestrator.tasks import SessionSlots, run_all
from holdfast.orchestrator.teacher import Teacher
from holdfast.orchestrator.weight_sync import PublishedWeights
from holdfast.protocol.rollouts import Dropped, Rollout, Signal, has_signal
from holdfast.run.journal import Counts, dropped_by_reason
from holdfast.run.run_dir import RunDir

_log = logging.getLogger("orchestrator")


@dataclass(frozen=True)
class Selection:
    """The groups of a batch, unused groups without signal, and why each other problem was dropped, in draw order."""

    groups: list[list[Rollout]]
    unused: list[list[Rollout]]
    dropped: list[Dropped]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]


def select(outcomes: Sequence[Outcome], *, num_groups: int, signal: Signal) -> Selection:
    """Return at most `num_groups` groups: groups with signal first, then the earliest of the others."""
    candidates = [place for place, outcome in enumerate(outcomes) if not isinstance(outcome, Dropped)]
    # sorted is stable: equals keep the order of the draw.
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


@dataclass(eq=False)
class BatchMaker:
    """Generates the rollouts of one batch after another; `state` always belongs to the last whole batch.

    Args:
        client: of the servers that sample: the policy's or the teacher's.
        environments: played in this process: by name, one per level of the curriculum.
        workers: of the other environments, by name.

    Attributes:
        num_reused: turns of the last batch that were sampled before a restart.
        metrics: further numbers about the last batch.
        digests: of the weights of the policy versions that sampled the last batch, beside the last version.
    """

    config: OrchestratorConfig
    client: InferenceClient
    _: KW_ONLY
    run_dir: RunDir
    tokenizer: Tokenizer
    environments: Mapping[str, Sequence[Environment]]
    state: OrchestratorState
    teacher: Teacher | None = None
    workers: Mapping[str, Workers] = field(default_factory=dict)
    num_reused: int = field(default=0, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    digests: dict[int, str] = field(default_factory=dict, init=False)
    curriculum_metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._settings = {section.label: section for section in self.config.environments}

    async def make(self, step: int, weights: PublishedWeights) -> Selection:
        """Return the groups of batch `step`, sampled by `weights`.

        The first draw is a whole batch. With dynamic sampling, each later draw replaces the groups without signal, up
        to the limit of draws; then groups without signal fill the batch. A draw begins after the groups of the draw
        before have ended, so it never depends on timing.

        Raises EnvironmentFailure if an environment failed and `on_error` is `stop`, or no group is left; InferenceError
        if an engine failed."""
        # A copy: a batch that fails leaves the state after the last whole one.
        state = self.state.copy()
        teacher, digest = self.teacher, weights.digest
        if self.config.is_sampled_by_teacher and teacher is not None:
            teacher, digest = None, teacher.digest
        log = self._open_log(step, digest)
        sampler = Sampler(self.client, log)
        player = GroupPlayer(self.config, self.tokenizer, sampler, self.workers)
        slots = SessionSlots(self.most_sessions)

        async def run_one(problem: Problem) -> Outcome:
            async with slots.taking(self.config.rollouts_of(problem.settings).group_size):
                outcome = await player.play(problem, step)
            if teacher is not None and not isinstance(outcome, Dropped):
                affinity = Affinity()
                await run_all(teacher.add_logprobs(rollout, log, affinity=affinity) for rollout in outcome)
            return outcome

        outcomes: list[Outcome] = []
        try:
            while number := self._num_to_draw(outcomes):
                problems = self._choose_problems(state, number)
                # In the order of the draw, whichever group ends first.
                outcomes += await guarded(sampler.failure.guard(run_all(run_one(problem) for problem in problems)))
        finally:
            await sampler.close()
        self.num_reused = sampler.num_reused
        return self._finish(step, state, outcomes)

    async def close(self) -> None:
        """End what lasts longer than one batch: nothing."""

    @property
    def most_sessions(self) -> int:
        """How many sessions are played at once, at most."""
        return max(self.config.client.max_concurrency * len(self.client.engines), self.config.largest_group)

    def _open_log(self, step: int, digest: str) -> GenerationLog:
        return GenerationLog(
            self.run_dir,
            step,
            weights_digest=digest,
            stop_token_ids=self.tokenizer.stop_token_ids,
            teacher_digest=self.teacher.digest if self.teacher else "",
            vocab_size=self.client.vocab_size,
        )

    def _finish(self, step: int, state: OrchestratorState, outcomes: Sequence[Outcome]) -> Selection:
        """Return the groups of a batch from the results of its problems, and move the state on to `step`."""
        selection = select(outcomes, num_groups=self.config.problems_per_step, signal=self.config.signal)
        self._check(step, selection)
        count(state, step, selection)
        # After the draw of the whole batch, so that levels only change between batches.
        advance(state, self.config, outcomes)
        scored = [outcome for outcome in outcomes if not isinstance(outcome, Dropped)]
        self.curriculum_metrics = curriculum_metrics(state, self.config, scored)
        self.state = state
        return selection

    def _num_to_draw(self, outcomes: Sequence[Outcome]) -> int:
        missing = self.config.problems_per_step - sum(has_signal(one, self.config.signal) for one in outcomes)
        return min(missing, self.config.max_problems_per_step - len(outcomes))

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
        num_equal = sum(not has_signal(group, self.config.signal) for group in selection.groups)
        if self.config.dynamic_sampling and num_equal:
            num_groups, num_drawn = len(selection.groups), len(selection.groups) + len(dropped)
            _log.warning(
                f"batch {step}: {num_equal} of its {num_groups} groups have no signal after {num_drawn} problems, the "
                "most that may be drawn for it"
            )

    def _choose_problems(self, state: OrchestratorState, number: int) -> list[Problem]:
        problems = []
        for _ in range(number):
            name = next_environment(state)
            seed, task_id = self._next_task(state.environments[name], name)
            problems.append(self._problem(seed, task_id))
        return problems

    def _problem(self, seed: TaskSeed, task_id: int) -> Problem:
        levels = self.environments.get(seed.environment)
        environment = levels[seed.level or 0] if levels is not None else None
        return Problem(environment, self._settings[seed.environment], seed, number=task_id)

    def _next_task(self, position: EnvironmentState, name: str) -> tuple[TaskSeed, int]:
        """Return the seed of the environment's next task and its number among all tasks; advances `position`."""
        task_id, seed = position.next_task, self.config.seed
        # Also for groups that are dropped later: no task comes twice.
        position.next_task += 1
        if self._settings[name].curriculum is None or position.curriculum is None:
            return TaskSeed(seed, name, task_id), task_id
        number = position.curriculum.level
        level = position.curriculum.levels[number]
        level.next_task += 1
        return TaskSeed(seed, name, level.next_task - 1, level=number), task_id


def adopt_curricula(state: OrchestratorState, config: OrchestratorConfig) -> None:
    """Make `state` fit the curricula of `config`, and log what changed since the checkpoint.

    Changed levels or arguments are judged from scratch, at the old level number or the last level; task numbers
    continue, so no task comes twice. A changed gate or window judges the rewards that the state has."""
    for section in config.environments:
        position, settings = state.environments[section.label], section.curriculum
        if settings is None:
            continue  # keep its state: the curriculum may come back
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode([section.args, settings.levels], order="sorted"))
        found = position.curriculum or CurriculumState(digest=digest)
        if found.digest != digest:
            found.level = min(found.level, len(settings.levels) - 1)
            for level in found.levels:
                level.rewards = []
            _log.warning(
                f"the levels of environment '{section.label}' changed since the checkpoint: it continues at level "
                f"{found.level}, judged from scratch"
            )
            found.digest = digest
        # Removed levels keep their state: they may come back.
        found.levels += [LevelState() for _ in range(len(settings.levels) - len(found.levels))]
        position.curriculum = found


def advance(state: OrchestratorState, config: OrchestratorConfig, outcomes: Sequence[Outcome]) -> None:
    """Add the groups of a batch, in draw order, to the windows of the curricula, and raise levels."""
    for section in config.environments:
        settings, curriculum = section.curriculum, state.environments[section.label].curriculum
        if settings is None or curriculum is None:
            continue
        for level, group in _leveled(outcomes, section.label):
            found = curriculum.levels[level]
            found.rewards = [*found.rewards, fmean(map(_total, group))][-settings.window :]
        latest = curriculum.levels[curriculum.level].rewards
        is_last, is_full = curriculum.level + 1 >= len(settings.levels), len(latest) >= settings.window
        if is_full and not is_last and (reward := fmean(latest)) >= settings.advance_reward:
            curriculum.level += 1
            _log.info(
                f"environment '{section.label}': level {curriculum.level} from the next batch on; mean reward "
                f"{reward:.4g}"
            )


def curriculum_metrics(
    state: OrchestratorState, config: OrchestratorConfig, groups: Sequence[list[Rollout]]
) -> dict[str, float]:
    """Return metrics of the levels of a batch and of their latest groups; `state` is after the batch."""
    metrics: dict[str, float] = {}
    for section in config.environments:
        position, own = state.environments[section.label], _leveled(groups, section.label)
        if section.curriculum is None or position.curriculum is None or not own:
            continue
        levels = [level for level, _ in own]  # one, except in rounds
        metrics[f"curriculum/{section.label}/level"] = fmean(levels)
        metrics[f"curriculum/{section.label}/reward"] = fmean(position.curriculum.levels[max(levels)].rewards)
    return metrics


def _leveled(outcomes: Sequence[Outcome], name: str) -> list[tuple[int, list[Rollout]]]:
    """Return the scored groups of an environment with the levels that they were drawn from."""
    return [
        (outcome[0].level, outcome)
        for outcome in outcomes
        if isinstance(outcome, list) and outcome[0].environment == name and outcome[0].level is not None
    ]


def _total(rollout: Rollout) -> float:
    return math.fsum([rollout.reward, *(rollout.step_rewards.rewards if rollout.step_rewards else ())])


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest integers in the ratio of the decimal numbers `weights`: 0.1 counts as 1/10."""
    fractions = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    denominator = lcm(*(fraction.denominator for fraction in fractions.values()))
    scaled = {name: int(fraction * denominator) for name, fraction in fractions.items()}
    divisor = gcd(*scaled.values())
    return {name: value // divisor for name, value in scaled.items()}


def adopt_mix(state: OrchestratorState, config: OrchestratorConfig) -> None:
    """Make `state` fit the environments of `config`: task numbers stay, and new environments begin at 0.

    A changed mix resets the credits, which count in units of the old weights, and logs a warning."""
    integers = integer_weights({section.label: section.weight for section in config.environments})
    before = {name: position.weight for name, position in state.environments.items()}
    for name, weight in integers.items():
        position = state.environments.setdefault(name, EnvironmentState())
        position.weight = weight
    for section in config.environments:
        state.environments[section.label].group_size = config.rollouts_of(section).group_size
    for name, position in state.environments.items():
        if name not in integers:
            # Keep its position: the environment may come back.
            position.weight = 0
    if before and before != {name: position.weight for name, position in state.environments.items()}:
        _log.warning("the mix of environments changed since the checkpoint: was %s, is %s", before, integers)
        for position in state.environments.values():
            position.credit = 0


def next_environment(state: OrchestratorState) -> str:
    """Return the environment of the next problem, and advance `state`.

    Smooth weighted round-robin (nginx's): each environment earns its weight, the richest pays the total. The shares of
    any stretch are as near to the weights as whole problems allow."""
    positions = {name: position for name, position in state.environments.items() if position.weight}
    for position in positions.values():
        position.credit += position.weight
    # Ties go to the first environment of the state, which keeps its order.
    chosen = max(positions, key=lambda name: positions[name].credit)
    positions[chosen].credit -= sum(position.weight for position in positions.values())
    return chosen
