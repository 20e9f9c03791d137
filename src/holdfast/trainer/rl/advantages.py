"""All advantages: how much better a rollout, or a token, was than expected. Pure functions, without torch.

The first ones take the rewards of one problem and nothing else, for any training loop. The others take the rollouts of
a batch (`ScoredRollout`); the critic's advantage takes the rewards and values of one rollout's tokens. A rollout has
one advantage, or one per token.

To add one, write its function here, and its line in `ADVANTAGES` of `holdfast.config.advantages`.

Shape legend: P problems of the batch, G rollouts of one problem, T sampled tokens of one rollout, K rewards of parts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from holdfast.errors import TrainingError
from holdfast.trainer.rl.token_rewards import Groups, ScoredRollout, reward_components

# Added to the standard deviation, as in verl's `compute_grpo_outcome_advantage`.
STD_EPSILON = 1e-6
# Added to the variance, as in `masked_whiten` of TRL and verl.
_WHITEN_EPSILON = 1e-8

AdvantageValue = float | Sequence[float] | np.ndarray
"""The advantages of a rollout: one number, or one for each of its T sampled tokens."""
RewardsAdvantage = Callable[[Sequence[float]], list[float]]
"""From the rewards of one problem, (G,), to as many advantages."""


def sample_std(values_G: Sequence[float]) -> float:
    """Return the sample standard deviation (denominator G - 1); 0 when all values are equal."""
    if max(values_G) == min(values_G):
        return 0.0
    mean = math.fsum(values_G) / len(values_G)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values_G) / (len(values_G) - 1))


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean(r)` (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2).

    Equal rewards give exactly 0."""
    # The mean of equal rewards may round, and GRPO would divide that by its epsilon.
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / (std(r) + 1e-6)` (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    The std is the sample std (G - 1), as in TRL's GRPOTrainer and in verl; the epsilon is verl's. The paper does not
    say which std it uses."""
    std = sample_std(rewards_G)
    return [centred / (std + STD_EPSILON) for centred in dr_grpo(rewards_G)]


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean of the others` (Ahmadian et al. 2024, "Back to Basics").

    That is G / (G - 1) times `r_i - mean(r)`. A group of one has no others: 0."""
    size = len(rewards_G)
    # At least 1: in a group of one answer there is nothing to compare with
    return [centred * size / max(1, size - 1) for centred in dr_grpo(rewards_G)]


def max_rl(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / mean(r)` (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning").

    The rarer a reward is in its group, the more it counts. Rewards are at least 0, such as 1 for success. Equal
    rewards, all 0 too, give exactly 0. Raise TrainingError if a reward is negative."""
    if min(rewards_G) < 0:
        raise TrainingError(
            f"advantage = 'max_rl' divides by the mean reward and needs rewards of at least 0, got {min(rewards_G)}. "
            "Shift the rewards, or choose another advantage."
        )
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [centred / mean if centred else 0.0 for centred in dr_grpo(rewards_G)]  # where the mean is 0, all are


def pass_at_k(rewards_G: Sequence[float], *, k: int) -> list[float]:
    """Return by how much a rollout raises the best reward of `k`: the mean of `max(S) - max(S without i)`.

    The mean is over all sets S of `k` rollouts of the group with rollout i among them. With rewards of 0 and 1 it
    raises pass@k; times k / G it is `s^(loo - 1)` of Walder and Karkhanis 2025, "Pass@K Policy Optimization", and with
    k = G the estimate of Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using
    Reinforcement Learning": the best less the second best for the best, 0 for the others (verl's `grpo_passk` without
    its division by the std). It is never negative. Raise TrainingError if there are fewer than `k` rollouts."""
    size = len(rewards_G)
    if size < k:
        raise TrainingError(
            f"advantage = 'pass_at_k' takes the best of advantage.k = {k} rollouts, and a problem has {size}: lower "
            "advantage.k, or raise orchestrator.group_size"
        )
    advantages = []
    for index, reward in enumerate(rewards_G):
        others = sorted([*rewards_G[:index], *rewards_G[index + 1 :]])
        # The best of k - 1 others is the one of rank `rank` for this share of all choices.
        shares = [math.comb(rank, k - 2) / math.comb(size - 1, k - 1) for rank in range(size - 1)]
        gains = [share * max(reward - other, 0.0) for share, other in zip(shares, others, strict=True)]
        advantages.append(math.fsum(gains))
    return advantages


def opo(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> list[float]:
    """Return `r_i - sum(l r) / sum(l)`, `l` being the sampled tokens of a rollout.

    The baseline of least variance where the gradients of tokens are alike and independent (Hao et al. 2025, "On-Policy
    RL with Optimal Reward Baseline"; verl's `compute_opo_outcome_advantage`). Equal rewards give exactly 0."""
    total = sum(lengths_G)
    if total == 0 or max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    baseline = math.fsum(length * reward for length, reward in zip(lengths_G, rewards_G, strict=True)) / total
    return [reward - baseline for reward in rewards_G]


def opo_of_rollouts(groups: Groups) -> list[list[float]]:
    """Return `opo` of the rollouts of each problem."""
    return [opo([one.total_reward for one in group], [one.num_tokens for one in group]) for group in groups]


def batch_grpo(groups: Groups) -> list[list[float]]:
    """Return `(r - mean of the group) / (std of the batch + 1e-6)`, sample std over the rewards of all rollouts.

    TRL's `scale_rewards = "batch"`; Liu et al. 2025, "Tricks or Traps? A Deep Dive into RL for LLM Reasoning"."""
    std = sample_std([one.total_reward for group in groups for one in group])
    centred_PG = [dr_grpo([one.total_reward for one in group]) for group in groups]
    return [[centred / (std + STD_EPSILON) for centred in centred_G] for centred_G in centred_PG]


def gdpo(groups: Groups, weights: Mapping[str, float]) -> list[list[float]]:
    """Return the weighted sum of `grpo` of each reward by itself, less its mean, over its std + 1e-6 in the batch.

    A reward with a large spread does not drown the others (Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization
    Policy Optimization"; TRL's `multi_objective_aggregation = "normalize_then_sum"`). Mean and sample std of the batch
    count rollouts. Raise TrainingError if there are rewards of parts, which have no weight."""
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
    """Return `function` of the rewards of whole rollouts, plus `function` of the rewards of parts if there are some.

    Process supervision of Shao et al. 2024, "DeepSeekMath", section 4.1.3: the rewards of all parts of all rollouts of
    a problem are normalised together, and a token gets the sum of those whose part ends with it or later. The outcome
    is normalised by itself and added, as in Cui et al. 2025, "Process Reinforcement through Implicit Rewards".

    That says which parts are better than others, and does not raise the sum of all. The same cost of every turn has no
    effect, and a rollout of more good turns has an advantage over a rollout of fewer turns."""
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


def reinforce_pp(groups: Groups) -> list[list[np.ndarray]]:
    """Return the rewards to go of every token, whitened over all sampled tokens of the batch.

    Hu et al. 2025, "REINFORCE++": the advantage of token t is `r - coef * sum of the KL of t and later tokens`, less
    its mean and divided by its std over the tokens of the batch. As verl's
    `compute_reinforce_plus_plus_outcome_advantage` with gamma 1. The mean is a baseline, so rollouts that are not
    trained count too."""
    return _whitened([[rewards_to_go(one.token_rewards) for one in group] for group in groups])


def reinforce_pp_baseline(groups: Groups) -> list[list[np.ndarray]]:
    """Return `r - mean` of the group at each token, whitened over all sampled tokens of the batch.

    Hu et al. 2025, "REINFORCE++", with baseline; as verl's
    `compute_reinforce_plus_plus_baseline_outcome_advantage`: a KL penalty counts as a sum."""
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


def whiten(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays with mean 0 and variance 1 over all their numbers: `(v - mean) / sqrt(var + 1e-8)`.

    The sample variance, as in `masked_whiten` of TRL and verl. Numbers that are all equal give exactly 0."""
    everything = np.concatenate([np.zeros(0), *values])
    if not len(everything) or everything.min() == everything.max():
        return [np.zeros(len(own)) for own in values]
    mean, std = everything.mean(), math.sqrt(everything.var(ddof=1) + _WHITEN_EPSILON)
    return [(own - mean) / std for own in values]


def rewards_to_go(rewards_T: np.ndarray) -> np.ndarray:
    """Return for each token the sum of its reward and all later ones, (T,)."""
    return np.cumsum(rewards_T[::-1])[::-1]


def online_dpo(groups: Groups, *, beta: float) -> list[list[float]]:
    """Return the advantages of all rollouts whose policy gradient is the gradient of DPO's loss, mean over the
    problems.

    Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback": the first of the best and the first of
    the worst rollout of a problem are a pair for the loss of Rafailov et al. 2023, eq. 7, `-log sigmoid(h)`, `h = beta
    (d_w - d_l)`, d = log policy - log reference of the whole answer. Its gradient is `-beta sigmoid(-h)` times the
    gradient of `l_w - l_l`. REINFORCE with `beta sigmoid(-h)` as the advantage of the best, minus that as the worst's,
    and 0 for all others takes the same step. This holds if a step has one update: h is computed with the weights before
    the step. With equal rewards no pair is formed, and all advantages are 0.

    The advantages are as many times larger as there are rollouts for each problem: then the mean over rollouts of the
    sums of their tokens (`aggregation = "constant"`, `constant_tokens = 1`) is the mean over problems.

    Args:
        beta: strength of the tie to the reference.
    """
    scale = sum(map(len, groups)) / max(1, len(groups))
    return [_of_problem(group, beta, scale) for group in groups]


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


def generalized_advantages(
    rewards_T: np.ndarray, values_T: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages_T and returns_T of one finished sequence, float64.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`, both V and A being 0 after the
    last token; the returns, which the critic learns, are A + V (Schulman et al. 2016, "High-Dimensional
    Continuous Control Using Generalized Advantage Estimation").

    Args:
        rewards_T: reward for each token; a reward of the whole sequence belongs to its last.
        values_T: the critic's value before each token.
        gamma: discount per token.
        lam: 0 trusts the critic for all but one reward; 1 takes only the rewards, less the value.
    """
    # Python floats: sums of float64 in one order, the same on every device.
    advantages: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(rewards_T.tolist()[::-1], values_T.tolist()[::-1], strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
    advantages_T = np.array(advantages[::-1], dtype=np.float64)
    return advantages_T, advantages_T + values_T
