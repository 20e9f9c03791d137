"""Chooses the next task: its environment by the configured mix, and its level by the curriculum.

The choice for batch N follows only from the state after batch N - 1. That state follows from the groups of earlier
batches, in the order of their draw. So timing, workers and kills cannot change the choice. The mix is deterministic and
exact, and resumes from counters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from statistics import fmean

import msgspec
import xxhash

from holdfast.config.environments import CurriculumConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.orchestrator.episodes import Outcome
from holdfast.orchestrator.state import CurriculumState, EnvironmentState, LevelState, OrchestratorState, stable_seed
from holdfast.protocol.rollouts import Rollout

_log = logging.getLogger("orchestrator")


def adopt_curricula(state: OrchestratorState, config: OrchestratorConfig) -> None:
    """Make `state` fit the curricula of `config`, and log what changed since the checkpoint.

    Other gates, windows and shares judge what the state holds. Other levels or arguments are judged from scratch, at
    the level with the old number, or the last one; their tasks continue, so that none comes twice.
    """
    for section in config.environments:
        position, settings = state.environments[section.label], section.curriculum
        if settings is None:
            continue  # what is there stays, should the curriculum come back
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode([section.args, settings.levels], order="sorted"))
        found = position.curriculum or CurriculumState(digest=digest)
        if found.digest != digest:
            found.level = min(found.level, len(settings.levels) - 1)
            for level in found.levels:
                level.rewards, level.variances = [], []
            _log.warning(
                "the levels of environment '%s' changed since the checkpoint: it goes on at level %d, judged anew",
                section.label,
                found.level,
            )
            found.digest = digest
        # Those of levels that are gone stay, should they come back.
        found.levels += [LevelState() for _ in range(len(settings.levels) - len(found.levels))]
        position.curriculum = found


def draw_level(state: CurriculumState, settings: CurriculumConfig, *, task_id: int, seed: int, name: str) -> int:
    """Return the level of the environment's next task, `task_id`; `seed` is the run's."""
    if settings.choice == "gates":
        return state.level
    shares = level_shares(state, settings)
    # Exact: which level it is must not depend on how a sum of floats rounds.
    drawn = Fraction(stable_seed("level", seed, name, task_id), 2**63)
    passed = Fraction(0)
    for level, share in enumerate(shares):
        passed += Fraction(share)
        if drawn < passed:
            return level
    return len(shares) - 1


def level_shares(state: CurriculumState, settings: CurriculumConfig) -> list[float]:
    """Return the share of tasks that each level gets with `choice = "variance"`.

    All get `uniform_share` alike; the rest is in proportion to the mean variance of the rewards in the latest groups. A
    level without groups counts as the level with the most.
    """
    known = [fmean(level.variances) if level.variances else None for level in state.levels[: len(settings.levels)]]
    most = max((value for value in known if value is not None), default=0.0)
    values = [most if value is None else value for value in known]
    total = math.fsum(values)
    if total == 0:
        return [1 / len(values)] * len(values)
    return [settings.uniform_share / len(values) + (1 - settings.uniform_share) * value / total for value in values]


def advance(state: OrchestratorState, config: OrchestratorConfig, outcomes: Sequence[Outcome]) -> None:
    """Take the groups of a whole batch, in the order of their draw, into the curricula, and raise levels."""
    for section in config.environments:
        settings, position = section.curriculum, state.environments[section.label]
        if settings is None or position.curriculum is None:
            continue
        for level, group in _leveled(outcomes, section.label):
            found = position.curriculum.levels[level]
            rewards = [_total(rollout) for rollout in group]
            found.rewards = [*found.rewards, fmean(rewards)][-settings.window :]
            found.variances = [*found.variances, _variance(rewards)][-settings.window :]
        if settings.choice == "gates":
            _pass_gates(position.curriculum, settings, name=section.label)


def _pass_gates(state: CurriculumState, settings: CurriculumConfig, *, name: str) -> None:
    latest = state.levels[state.level]
    if state.level + 1 >= len(settings.levels) or len(latest.rewards) < settings.window:
        return
    reward, mastered = fmean(latest.rewards), mastered_share(latest)
    by_reward = settings.advance_reward is not None and reward >= settings.advance_reward
    by_mastered = settings.advance_mastered is not None and mastered >= settings.advance_mastered
    if by_reward or by_mastered:
        state.level += 1
        _log.info(
            "environment '%s': level %d from the next batch on; mean reward %.4g, share of groups mastered %.4g",
            name,
            state.level,
            reward,
            mastered,
        )


def mastered_share(level: LevelState) -> float:
    """Return the share of the latest groups whose rewards are all equal, and above 0."""
    pairs = zip(level.rewards, level.variances, strict=True)
    return fmean([variance == 0 and reward > 0 for reward, variance in pairs])


def curriculum_metrics(
    state: OrchestratorState, config: OrchestratorConfig, groups: Sequence[list[Rollout]]
) -> dict[str, float]:
    """Return, by name, how a batch was spread over levels, and what their latest groups came to; `state` is after
    it."""
    metrics: dict[str, float] = {}
    for section in config.environments:
        position, own = state.environments[section.label], _leveled(groups, section.label)
        if section.curriculum is None or position.curriculum is None or not own:
            continue
        levels = [level for level, _ in own]
        latest = [position.curriculum.levels[level] for level in sorted(set(levels))]
        prefix = f"curriculum/{section.label}"
        metrics[f"{prefix}/level"] = fmean(levels)
        metrics[f"{prefix}/reward"] = fmean([reward for level in latest for reward in level.rewards])
        metrics[f"{prefix}/variance"] = fmean([variance for level in latest for variance in level.variances])
        metrics[f"{prefix}/mastered"] = fmean([mastered_share(level) for level in latest])
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


def _variance(rewards: Sequence[float]) -> float:
    """Return the population variance; exactly 0 of equal rewards, whose mean may round."""
    if min(rewards) == max(rewards):
        return 0.0
    mean = fmean(rewards)
    return fmean([(reward - mean) ** 2 for reward in rewards])


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest integers in the ratio of the decimal numbers `weights`: 0.1 counts as 1/10."""
    fractions = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    denominator = lcm(*(fraction.denominator for fraction in fractions.values()))
    scaled = {name: int(fraction * denominator) for name, fraction in fractions.items()}
    divisor = gcd(*scaled.values())
    return {name: value // divisor for name, value in scaled.items()}


def adopt_mix(state: OrchestratorState, config: OrchestratorConfig) -> None:
    """Make `state` fit the environments of `config`: positions stay, new environments begin at 0.

    Credits count in units of the old weights, so a changed mix starts them anew, with a warning.
    """
    integers = integer_weights({section.label: section.weight for section in config.environments})
    before = {name: position.weight for name, position in state.environments.items()}
    for name, weight in integers.items():
        position = state.environments.setdefault(name, EnvironmentState())
        position.weight = weight
    for section in config.environments:
        state.environments[section.label].group_size = config.rollouts_of(section).group_size
    for name, position in state.environments.items():
        if name not in integers:
            # Kept at its place: it goes on there should it come back.
            position.weight = 0
    if before and before != {name: position.weight for name, position in state.environments.items()}:
        _log.warning("the mix of environments changed since the checkpoint: was %s, is %s", before, integers)
        for position in state.environments.values():
            position.credit = 0


def next_environment(state: OrchestratorState) -> str:
    """Return the environment of the next problem, and move `state` on.

    Smooth weighted round-robin (nginx's): each earns its weight, the richest pays the total. So over any stretch the
    shares are as near to the weights as whole problems allow.
    """
    positions = {name: position for name, position in state.environments.items() if position.weight}
    for position in positions.values():
        position.credit += position.weight
    # Ties go to the environment that stands first in the state, which keeps its order.
    chosen = max(positions, key=lambda name: positions[name].credit)
    positions[chosen].credit -= sum(position.weight for position in positions.values())
    return chosen
