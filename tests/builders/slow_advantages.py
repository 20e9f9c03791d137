"""Advantages in plain Python, from the papers: slow and obvious, to compare the real ones with."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from holdfast.config.advantages import ADVANTAGES
from holdfast.config.algorithm import CriticConfig
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.assign_advantages import (
    add_distillation,
    assign_advantages,
    assign_gae_advantages,
    whiten_advantages,
)
from holdfast.trainer.rl.batch import ADVANTAGE, OLD_LOGPROB, REFERENCE_LOGPROB, RETURN, VALUE, target_values
from holdfast.trainer.rl.token_rewards import Groups, ScoredRollout
from tests.builders.scored_rollouts import advantage_of, scored_rollout

Group = Sequence[ScoredRollout]


_advantage_of = cache(advantage_of)


def random_groups(
    seed: int, *, scale: float = 1.0, sizes: tuple[int, ...] = (5, 5, 5), has_parts: bool = False
) -> Groups:
    """Groups of rollouts of 0 to 6 tokens with a reward of each, and perhaps with rewards of some tokens beside it."""
    generator = np.random.default_rng(seed)
    groups = []
    for task, size in enumerate(sizes):
        group = []
        for _ in range(size):
            num_tokens, reward = int(generator.integers(0, 7)), scale * float(generator.random())
            token_rewards = -scale * 0.1 * generator.random(num_tokens)
            if num_tokens:
                token_rewards[-1] += reward - token_rewards.sum()
            ends = np.flatnonzero(generator.random(num_tokens) < 0.5 * has_parts)
            parts = scale * generator.random(len(ends))
            token_rewards[ends] += parts
            metrics = {"other": scale * float(generator.random())}
            group.append(
                scored_rollout(
                    reward, num_tokens, task_id=task, token_rewards=token_rewards, metrics=metrics,
                    step_ends=ends, step_rewards=parts,
                )
            )  # fmt: skip
        groups.append(group)
    return groups


def by_token(name: str, groups: Groups, **settings: str) -> list[list[float]]:
    given = [value for group in _advantage_of(name, **settings)(groups) for value in group]
    rollouts = [one for group in groups for one in group]
    return [
        [value] * one.num_tokens if isinstance(value, float) else list(value)
        for value, one in zip(given, rollouts, strict=True)
    ]


def whitened(values: list[list[float]]) -> list[list[float]]:
    """Every list less the mean of all numbers, over their standard deviation, as PPO implementations do."""
    everything = [value for own in values for value in own]
    if len(set(everything)) < 2:
        return [[0.0] * len(own) for own in values]
    mean, variance = statistics.fmean(everything), statistics.variance(everything)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in own] for own in values]


def sums(group: Group) -> list[float]:
    """The rewards of the rollouts, of the whole and of all parts."""
    return [one.reward + sum(one.step_rewards.tolist()) for one in group]


def centred(rewards: Sequence[float]) -> list[float]:
    return [reward - sum(rewards) / len(rewards) if len(set(rewards)) > 1 else 0.0 for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    return [one / (statistics.stdev(rewards) + 1e-6) if one else 0.0 for one in centred(rewards)]


def above_the_others(rewards: Sequence[float]) -> list[float]:
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others if len(set(rewards)) > 1 else 0.0 for reward in rewards]


def over_the_mean(rewards: Sequence[float]) -> list[float]:
    return [one / statistics.fmean(rewards) if one else 0.0 for one in centred(rewards)]


def gains_of_two(rewards: Sequence[float]) -> list[float]:
    """By how much each rollout raises the best of two, as a mean over every pair that holds it."""
    pairs = list(combinations(range(len(rewards)), 2))
    found = []
    for index, reward in enumerate(rewards):
        others = [rewards[a if b == index else b] for a, b in pairs if index in (a, b)]
        found.append(sum(max(reward, other) - other for other in others) / len(others))
    return found


def above_the_mean_of_tokens(group: Group) -> list[float]:
    rewards, tokens = sums(group), [one.num_tokens for one in group]
    if len(set(rewards)) == 1 or not sum(tokens):
        return [0.0] * len(rewards)
    mean = sum(n * reward for n, reward in zip(tokens, rewards, strict=True)) / sum(tokens)
    return [reward - mean for reward in rewards]


def online_dpo(groups: Groups) -> list[list[float]]:
    """A tenth is the beta, and -0.1 the log-ratio of every token in `tests.builders.scored_rollouts`."""
    scale, found = sum(map(len, groups)) / len(groups), []
    for group in groups:
        rewards, given = sums(group), [0.0] * len(group)
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        if best != worst:
            given[best] = scale * 0.1 / (1 + math.exp(0.1 * -0.1 * (group[best].num_tokens - group[worst].num_tokens)))
            given[worst] = -given[best]
        found.append(given)
    return found


def gdpo(groups: Groups) -> list[float]:
    """What each rollout is given, with the weights of `tests.builders.advantage_settings`."""
    both = []
    for group in groups:
        own, other = ([one.environment_reward for one in group], [one.metrics["other"] for one in group])
        both += [a + 0.5 * b for a, b in zip(standardised(own), standardised(other), strict=True)]
    return standardised(both)


def spread(values: Sequence[float], groups: Groups) -> list[list[float]]:
    """Give every token of a rollout its value."""
    rollouts = [one for group in groups for one in group]
    return [[value] * one.num_tokens for value, one in zip(values, rollouts, strict=True)]


def of_groups(function: Callable[[Sequence[float]], list[float]]) -> Callable[[Groups], list[list[float]]]:
    return lambda groups: spread([value for group in groups for value in function(sums(group))], groups)


def to_go(groups: Groups) -> list[list[float]]:
    return [[sum(one.token_rewards[now:].tolist()) for now in range(one.num_tokens)] for g in groups for one in g]


def process_supervision(groups: Groups) -> list[list[float]]:
    """DeepSeekMath, section 4.1.3, with the outcomes by themselves."""
    found = []
    for group in groups:
        parts = standardised([reward for one in group for reward in one.step_rewards.tolist()])
        for one, outcome in zip(group, standardised([one.reward for one in group]), strict=True):
            own = dict(zip(one.step_ends.tolist(), [parts.pop(0) for _ in one.step_ends], strict=True))
            found.append([outcome + sum(v for end, v in own.items() if end >= t) for t in range(one.num_tokens)])
    return found


REFERENCES: dict[str, Callable[[Groups], list[list[float]]]] = {
    "dr_grpo": of_groups(centred), "grpo": of_groups(standardised), "grpo_process": process_supervision,
    "rloo": of_groups(above_the_others), "max_rl": of_groups(over_the_mean),
    "opo": lambda groups: spread([value for group in groups for value in above_the_mean_of_tokens(group)], groups),
    "pass_at_k": of_groups(gains_of_two), "gdpo": lambda groups: spread(gdpo(groups), groups),
    "online_dpo": lambda groups: spread([value for given in online_dpo(groups) for value in given], groups),
    "reinforce_pp_baseline": lambda groups: whitened(of_groups(centred)(groups)),
    "reinforce_pp": lambda groups: whitened(to_go(groups)),
}  # fmt: skip
"""What every token is given, by the name of the advantage."""


def check_advantage(name: str, seed: int) -> None:
    """Compare what every token of ragged groups is given with the slow advantage; of a model, with its formula."""
    draw = random.Random(f"{name} {seed}")
    if ADVANTAGES[name].function is None:
        _OF_MODELS[name](draw)
        return
    groups = random_groups(
        seed, scale=draw.choice([1e-6, 1.0, 1e6]), sizes=draw.choice([(5, 2, 8), (3,)]),
        has_parts=name != "gdpo" and draw.random() < 0.5,
    )  # fmt: skip
    for mine, theirs in zip(by_token(name, groups), REFERENCES[name](groups), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    if name == "grpo":
        everything = [reward for group in groups for reward in sums(group)]
        scaled = [one / (statistics.stdev(everything) + 1e-6) for group in groups for one in centred(sums(group))]
        for mine, theirs in zip(by_token(name, groups, std="batch"), spread(scaled, groups), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def _sample(draw: random.Random, *columns: str) -> Sample:
    """A prompt of two tokens, and up to six of which some are sampled."""
    mask = [False, False, *(draw.random() < 0.7 for _ in range(draw.randint(0, 6)))]
    numbers = {name: np.array([draw.gauss(-1, 1) for _ in mask], dtype=np.float32) for name in columns}
    return Sample(np.arange(len(mask), dtype=np.int32), np.array(mask), numbers)


def _check_gae(draw: random.Random) -> None:
    """Schulman et al. 2016, eq. 16: the sum of all later errors of the critic, each discounted by gamma lambda."""
    config = CriticConfig(gamma=draw.choice([1.0, 0.9]), lam=draw.choice([0.0, 0.95, 1.0]))
    samples = [_sample(draw, VALUE) for _ in range(3)]
    rewards = [[draw.gauss(0, 1) for _ in sample.targets] for sample in samples]
    rollouts = [scored_rollout(0.0, len(own), token_rewards=np.array(own)) for own in rewards]
    assign_gae_advantages(samples, [rollouts], config)
    expected = []
    for sample, own in zip(samples, rewards, strict=True):
        values = [*target_values(sample, VALUE).tolist(), 0.0]
        errors = [reward + config.gamma * values[t + 1] - values[t] for t, reward in enumerate(own)]
        discounts = [(config.gamma * config.lam) ** far for far in range(len(own))]
        expected.append([sum(d * e for d, e in zip(discounts, errors[t:], strict=False)) for t in range(len(own))])
        returns = [value + advantage for value, advantage in zip(values, expected[-1], strict=False)]
        assert target_values(sample, RETURN).tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)
    if draw.random() < 0.5:
        whiten_advantages(samples)
        expected = whitened(expected) if sum(map(len, expected)) > 1 else expected
    for sample, own in zip(samples, expected, strict=True):
        assert target_values(sample, ADVANTAGE).tolist() == pytest.approx(own, rel=1e-4, abs=1e-4)
        assert not any(np.delete(sample.per_token[name], sample.targets).any() for name in (ADVANTAGE, RETURN))


def _check_distillation(draw: random.Random) -> None:
    """A token that the teacher likes more than the policy gets more than its reward."""
    samples = [_sample(draw, OLD_LOGPROB, REFERENCE_LOGPROB) for _ in range(draw.randint(1, 3))]
    coef, rewarded = draw.choice([1.0, 0.3]), draw.choice([0.0, -1.5])
    assign_advantages(samples, [[rewarded] * len(samples)])
    metrics, divergences = add_distillation(samples, coef), []
    for sample in samples:
        own = target_values(sample, OLD_LOGPROB) - target_values(sample, REFERENCE_LOGPROB)
        expected = [rewarded - coef * value for value in own.tolist()]
        assert target_values(sample, ADVANTAGE).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        divergences += own.tolist()
    assert metrics["distillation/kl"] == pytest.approx(sum(divergences) / max(1, len(divergences)), abs=1e-9)


_OF_MODELS = {"gae": _check_gae, "distillation": _check_distillation}
