"""Advantages: how much better a rollout, or a token, was than expected.

`build_advantage` chooses an advantage for the rollouts of a batch: the choice of their environment, a built-in one, or
a user's function. A rollout has one advantage, or one per token, or those of a critic (`holdfast.trainer.rl.gae`). To
add one, write its function here, or in `group_advantages` if it takes rewards, and its line in `ADVANTAGES` of
`holdfast.config.base`.

Shape legend: P problems of the batch, G rollouts of one problem, T sampled tokens of one rollout, K rewards of parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from holdfast.config.algorithm import CriticConfig
from holdfast.config.base import ADVANTAGES, GROUP_ADVANTAGES, SINGLE_ADVANTAGES
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.errors import DataError, TrainingError
from holdfast.process.imports import calling, load_function
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl import group_advantages
from holdfast.trainer.rl.batch import (
    ADVANTAGE,
    OLD_LOGPROB,
    REFERENCE_LOGPROB,
    RETURN,
    VALUE,
    assign_targets,
    target_values,
)
from holdfast.trainer.rl.gae import generalized_advantages
from holdfast.trainer.rl.group_advantages import STD_EPSILON, dr_grpo, grpo, opo, sample_std
from holdfast.trainer.rl.rewards import reward_components
from holdfast.trainer.rl.scored_rollouts import Groups, ScoredRollout

# Added to the variance, as in `masked_whiten` of TRL and verl.
_WHITEN_EPSILON = 1e-8


AdvantageValue = float | Sequence[float] | np.ndarray
"""What an advantage gives a rollout: one number, or one for each of its T sampled tokens."""


Advantage = Callable[[Groups], Sequence[Sequence[AdvantageValue]]]


RewardsAdvantage = Callable[[Sequence[float]], list[float]]
"""From the rewards of one problem, (G,), to as many advantages."""


def rewards_to_go(rewards_T: np.ndarray) -> np.ndarray:
    """Return for each token the sum of its reward and all later ones, (T,)."""
    return np.cumsum(rewards_T[::-1])[::-1]


def whiten(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays with mean 0 and variance 1 over all their numbers: `(v - mean) / sqrt(var + 1e-8)`.

    The sample variance, as in `masked_whiten` of TRL and verl. Numbers that are all equal give exactly 0.
    """
    everything = np.concatenate([np.zeros(0), *values])
    if not len(everything) or everything.min() == everything.max():
        return [np.zeros(len(own)) for own in values]
    mean, std = everything.mean(), math.sqrt(everything.var(ddof=1) + _WHITEN_EPSILON)
    return [(own - mean) / std for own in values]


def assign_advantages(samples: Sequence[Sample], advantages_PG: Sequence[Sequence[AdvantageValue]]) -> None:
    """Give every token of a sample the advantage of its rollout, or each target its own."""
    for sample, value in zip(samples, chain.from_iterable(advantages_PG), strict=True):
        if isinstance(value, int | float):
            sample.per_token[ADVANTAGE] = np.full(len(sample.token_ids), value, dtype=np.float32)
        else:
            assign_targets(sample, ADVANTAGE, value)


def assign_gae_advantages(samples: Sequence[Sample], rollouts_PG: Groups, config: CriticConfig) -> None:
    """Give every target its advantage and return by GAE: penalties at each token, the reward at the last one.

    As in Ouyang et al. 2022, "Training language models to follow instructions with human feedback".
    """
    for sample, rollout in zip(samples, chain.from_iterable(rollouts_PG), strict=True):
        advantages_T, returns_T = generalized_advantages(
            torch.from_numpy(rollout.token_rewards.copy()),
            torch.from_numpy(target_values(sample, VALUE)),
            gamma=config.gamma,
            lam=config.lam,
        )
        assign_targets(sample, ADVANTAGE, advantages_T.numpy())
        assign_targets(sample, RETURN, returns_T.numpy())


def whiten_advantages(samples: Sequence[Sample]) -> None:
    """Bring the advantages of all targets to mean 0 and variance 1, see `whiten`; a single one stays as it is."""
    found = [target_values(sample, ADVANTAGE) for sample in samples]
    if sum(map(len, found)) < 2:
        return
    for sample, whitened_T in zip(samples, whiten(found), strict=True):
        assign_targets(sample, ADVANTAGE, whitened_T)


def add_distillation(samples: Sequence[Sample], coef: float) -> dict[str, float]:
    """Add `coef (log teacher - log policy)` to the advantage of every target; return a metric.

    The policy is that before the step. The policy gradient with this advantage lowers KL(policy || teacher) token by
    token (Gu et al. 2024, "MiniLLM"; Agarwal et al. 2024, "On-Policy Distillation of Language Models"; without their
    corrections for later tokens).

    Returns:
        `distillation/kl`: the mean over the targets of `log policy - log teacher`, which estimates that divergence.

    Raises:
        DataError: there are no log-probabilities of a teacher.
    """
    divergences = [0.0]
    for sample in samples:
        if REFERENCE_LOGPROB not in sample.per_token:
            raise DataError(
                "trainer.distillation (and trainer.advantage = 'distillation') needs the log-probabilities of a "
                "teacher, and the batch has none: set orchestrator.teacher with mode = 'logprobs', or "
                "trainer.kl.reference"
            )
        divergence_T = target_values(sample, OLD_LOGPROB) - target_values(sample, REFERENCE_LOGPROB)
        assign_targets(sample, ADVANTAGE, target_values(sample, ADVANTAGE) - coef * divergence_T)
        divergences += divergence_T.tolist()
    return {"distillation/kl": math.fsum(divergences) / max(1, len(divergences) - 1)}


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean, population std and largest magnitude over the trained tokens."""
    found = np.concatenate([target_values(sample, ADVANTAGE) for sample in samples])
    if not len(found):
        return {}
    return {
        "advantage/mean": float(found.mean()),
        "advantage/std": float(found.std()),
        "advantage/max_abs": float(np.abs(found).max()),
    }


def opo_of_rollouts(groups: Groups) -> list[list[float]]:
    """Return `opo` of the rollouts of each problem."""
    return [opo([one.total_reward for one in group], [one.num_tokens for one in group]) for group in groups]


def batch_grpo(groups: Groups) -> list[list[float]]:
    """Return `(r - mean of the group) / (std of the batch + 1e-6)`, sample std over the rewards of all rollouts.

    TRL's `scale_rewards = "batch"`; Liu et al. 2025, "Tricks or Traps? A Deep Dive into RL for LLM Reasoning".
    """
    std = sample_std([one.total_reward for group in groups for one in group])
    centred_PG = [dr_grpo([one.total_reward for one in group]) for group in groups]
    return [[centred / (std + STD_EPSILON) for centred in centred_G] for centred_G in centred_PG]


def gdpo(groups: Groups, weights: Mapping[str, float]) -> list[list[float]]:
    """Return the weighted sum of `grpo` of each reward by itself, less its mean, over its std + 1e-6 in the batch.

    So a reward with a large spread does not drown the others (Liu et al. 2026, "GDPO: Group reward-Decoupled
    Normalization Policy Optimization"; TRL's `multi_objective_aggregation = "normalize_then_sum"`). Mean and sample
    std of the batch count rollouts.

    Raises:
        TrainingError: there are rewards of parts, which have no weight.
    """
    if any(len(one.step_rewards) for group in groups for one in group):
        raise TrainingError(
            "advantage = 'gdpo' weighs the rewards of rewards.weights, and an environment gives rewards of turns or "
            "tokens besides: leave these out, or take an advantage that knows them, such as grpo"
        )
    values_PG = [[reward_components(one.environment_reward, one.metrics) for one in group] for group in groups]
    sums = []
    for values_G in values_PG:
        normalised = {name: grpo([values[name] for values in values_G]) for name in weights}
        sums += [math.fsum(weights[name] * normalised[name][i] for name in weights) for i in range(len(values_G))]
    whitened = iter(grpo(sums))
    return [[next(whitened) for _ in group] for group in groups]


def with_steps(function: RewardsAdvantage, groups: Groups) -> list[list[AdvantageValue]]:
    """Return `function` of the rewards of the wholes and, where there are rewards of parts, of those as well.

    Process supervision of Shao et al. 2024, "DeepSeekMath", section 4.1.3: the rewards of all parts of all rollouts of
    a problem are normalised together, and a token gets the sum of those whose part ends with it or later. The outcome
    is normalised by itself and added, as in Cui et al. 2025, "Process Reinforcement through Implicit Rewards".

    That says which parts are better than others, and does not raise the sum of all: the same cost of every turn has no
    effect, and a rollout of more good turns has an advantage over one that needs fewer.
    """
    return [_with_steps(function, group) for group in groups]


def _with_steps(function: RewardsAdvantage, group: Sequence[ScoredRollout]) -> list[AdvantageValue]:
    outcomes_G = function([one.reward for one in group])
    rewards_GK = [reward for one in group for reward in one.step_rewards.tolist()]
    if not rewards_GK:
        return list(outcomes_G)
    of_steps = iter(function(rewards_GK))
    given: list[AdvantageValue] = []
    for one, outcome in zip(group, outcomes_G, strict=True):
        steps_T = np.zeros(one.num_tokens)
        steps_T[one.step_ends] = [next(of_steps) for _ in one.step_ends]
        given.append(outcome + rewards_to_go(steps_T))
    return given


def build_advantage(config: TrainerConfig) -> Advantage:
    """Return what gives every rollout of a batch the advantage of its environment, times the environment's weight.

    What an advantage normalises over the batch it normalises over the groups that it is the advantage of.

    Raises:
        ConfigError: a function of the user cannot be loaded.
        TrainingError: (of the returned function) a group of one where rollouts are compared.
    """
    functions = {name: build_named_advantage(name, config) for name in config.advantages}
    weights = {label: section.weight for label, section in config.environments.items()}

    def advantage(groups: Groups) -> list[list[AdvantageValue]]:
        found: dict[int, Sequence[AdvantageValue]] = {}
        for name, function in functions.items():
            own = {n: group for n, group in enumerate(groups) if config.advantage_of(group[0].environment) == name}
            if not own:
                continue
            if config.loss.type != "sft":
                require_siblings(list(own.values()), name)
            found |= dict(zip(own, function(list(own.values())), strict=True))
        scales = [weights.get(group[0].environment, 1.0) for group in groups]
        return [[_scaled(value, scale) for value in found[n]] for n, scale in enumerate(scales)]

    return advantage


def _scaled(value: AdvantageValue, scale: float) -> AdvantageValue:
    return scale * value if isinstance(value, int | float) else scale * np.asarray(value, dtype=np.float64)


def build_named_advantage(name: str, config: TrainerConfig) -> Advantage:
    """Return the advantage that `name` stands for: a built-in one, or the user's `module:function`.

    A function of the user gets the rollouts of the batch as a list of lists of `ScoredRollout`, problem by problem,
    and returns as many values: finite numbers, or sequences of one for each sampled token.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """
    if name not in ADVANTAGES:
        return _user_advantage(name)
    built_in = ADVANTAGES[name]
    assert built_in.function is not None, f"{name} is not computed from rewards"
    settings = {argument: attrgetter(setting)(config) for argument, setting in built_in.settings.items()}
    function = partial(built_in_function(built_in.function), **settings)
    if name == "grpo" and config.advantage_std == "batch":
        return batch_grpo  # its std is over problems, so it sees them all
    if built_in.takes == "rewards":
        return lambda groups: [function([one.total_reward for one in group]) for group in groups]
    return partial(with_steps, function) if built_in.takes == "step_rewards" else function


def built_in_function(name: str) -> Callable[..., Any]:
    """Return the function of an advantage: one of this module, or of `group_advantages`."""
    return globals().get(name) or getattr(group_advantages, name)


def require_siblings(groups: Groups, name: str) -> None:
    """Refuse a group of one where the advantage `name` compares the rollouts of a group.

    Raises:
        TrainingError: there is one; says which.
    """
    alone = next((group[0] for group in groups if len(group) < 2), None)
    if name in GROUP_ADVANTAGES and alone is not None:
        raise TrainingError(
            f"advantage = '{name}' compares the rollouts of one problem, and task {alone.task_id} of environment "
            f"'{alone.environment}' has a single one: set orchestrator.group_size to 2 or more, or take an advantage "
            f"that needs no group: {', '.join(SINGLE_ADVANTAGES)}"
        )


def _user_advantage(name: str) -> Advantage:
    function = load_function(name, key="advantage")

    def advantage(groups: Groups) -> list[list[float | np.ndarray]]:
        with calling(name, key="advantage"):
            returned = [[_plain(value) for value in group] for group in function([list(group) for group in groups])]
        sizes, wanted = [len(group) for group in returned], [len(group) for group in groups]
        if sizes != wanted:
            raise TrainingError(f"advantage = '{name}' returned groups of {sizes} values for groups of {wanted}")
        for value, one in zip(chain.from_iterable(returned), chain.from_iterable(groups), strict=True):
            _check(value, one, name)
        return returned

    return advantage


def _plain(value: AdvantageValue) -> float | np.ndarray:
    numbers = np.asarray(value, dtype=np.float64)
    return numbers if numbers.ndim else float(numbers)


def _check(value: float | np.ndarray, one: ScoredRollout, name: str) -> None:
    """Refuse what is neither one finite number nor one for each sampled token."""
    whose = f"task {one.task_id} of environment '{one.environment}'"
    if isinstance(value, np.ndarray) and value.shape != (one.num_tokens,):
        raise TrainingError(
            f"advantage = '{name}' returned an array of shape {value.shape} for a rollout of {whose} with "
            f"{one.num_tokens} sampled tokens: return one number, or one for each sampled token"
        )
    if not np.isfinite(value).all():
        raise TrainingError(f"advantage = '{name}' returned a number that is not finite for {whose}: {value}")


def reinforce_pp(groups: Groups) -> list[list[np.ndarray]]:
    """Return the rewards to go of every token, whitened over all sampled tokens of the batch.

    Hu et al. 2025, "REINFORCE++": the advantage of token t is `r - coef * sum of the KL of t and later tokens`, less
    its mean and divided by its std over the tokens of the batch. As verl's
    `compute_reinforce_plus_plus_outcome_advantage` with gamma 1. The mean is a baseline, so rollouts that are not
    trained count too.
    """
    return _whitened([[rewards_to_go(one.token_rewards) for one in group] for group in groups])


def reinforce_pp_baseline(groups: Groups) -> list[list[np.ndarray]]:
    """Return `r - mean` of the group at each token, whitened over all sampled tokens of the batch.

    Hu et al. 2025, "REINFORCE++", with baseline; as verl's
    `compute_reinforce_plus_plus_baseline_outcome_advantage`: a KL penalty counts as a sum.
    """
    return _whitened(
        [
            [
                np.full(one.num_tokens, value)
                for one, value in zip(group, dr_grpo([one.total_reward for one in group]), strict=True)
            ]
            for group in groups
        ]
    )


def _whitened(values_PG: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    whitened = iter(whiten(list(chain.from_iterable(values_PG))))
    return [[next(whitened) for _ in values_G] for values_G in values_PG]


def online_dpo(groups: Groups, *, beta: float | None) -> list[list[float]]:
    """Return the advantages of all rollouts whose policy gradient is that of DPO's loss, mean over the problems.

    Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback": the first of the best and the first of
    the worst rollout of a problem are a pair for the loss of Rafailov et al. 2023, eq. 7, `-log sigmoid(h)`, `h =
    beta (d_w - d_l)`, d = log policy - log reference of the whole answer. Its gradient is `-beta sigmoid(-h)` times
    that of `l_w - l_l`, so REINFORCE with `beta sigmoid(-h)` as the advantage of the best, minus that as the worst's,
    and 0 for all others takes the same step. It does so for the one update of a step: h is that of the weights before.
    With equal rewards there is no pair, and all advantages are 0.

    The advantages are as many times larger as there are rollouts for each problem: then the mean over rollouts of the
    sums of their tokens (`aggregation = "constant"`, `constant_tokens = 1`) is the mean over problems.

    Args:
        beta: strength of the tie to the reference. None: 0.1, as for DPO.
    """
    scale = sum(map(len, groups)) / max(1, len(groups))
    return [_of_problem(group, 0.1 if beta is None else beta, scale) for group in groups]


def _of_problem(group: Sequence[ScoredRollout], beta: float, scale: float) -> list[float]:
    best = max(range(len(group)), key=lambda place: group[place].total_reward)
    worst = min(range(len(group)), key=lambda place: group[place].total_reward)
    advantages_G = [0.0] * len(group)
    if group[best].total_reward != group[worst].total_reward:
        margin = beta * (_log_ratio(group[best]) - _log_ratio(group[worst]))
        # sigmoid(-margin) without an overflow
        smaller = math.exp(-abs(margin))
        advantages_G[best] = scale * beta * (smaller if margin > 0 else 1.0) / (1 + smaller)
        advantages_G[worst] = -advantages_G[best]
    return advantages_G


def _log_ratio(one: ScoredRollout) -> float:
    """Return log policy - log reference of the whole answer before the step, in nats."""
    assert one.old_logprobs is not None and one.reference_logprobs is not None  # the config asks for both
    return math.fsum(np.subtract(one.old_logprobs, one.reference_logprobs, dtype=np.float64).tolist())
