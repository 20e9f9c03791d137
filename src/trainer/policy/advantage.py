"""Advantages: how much better a rollout is than its siblings of the same problem, or than the batch.

Shape legend: P problems of the batch, G rollouts of one problem, T sampled tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from triad.config.rl_trainer import GROUP_ADVANTAGES, SINGLE_ADVANTAGES
from triad.errors import TrainingError
from triad.user_functions import load_function

# Added to the standard deviation, as in verl's `compute_grpo_outcome_advantage`.
_EPSILON = 1e-6
# Added to the variance, as in `masked_whiten` of TRL and verl.
_WHITEN_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class JudgedRollout:
    """One rollout as an advantage sees it; it is only to be read. T: its sampled tokens, in their order.

    Attributes:
        environment: name of the environment.
        task_id: position of the task in the environment's endless sequence.
        token_ids: the whole session, prompt first, int32.
        places: of the sampled tokens in `token_ids`, (T,).
        turns: first token and end of every stretch of sampled tokens, as indices of T.
        logprobs: under the policy that sampled, at its temperature, (T,), float32.
        truncated: a token limit ended the session or a turn.
        is_trained: whether its tokens are in the loss; with `rewards.truncated = "mask"` truncated ones are not.
        environment_reward: what the environment gave.
        metrics: further numbers of the environment.
        reward: what it earned in all: after reward model, length penalty, clip and scale, less its KL penalties.
        token_rewards: the same token by token, (T,), float64: KL penalties at each token, the rest at the last.
    """

    environment: str
    task_id: int
    token_ids: np.ndarray
    places: np.ndarray
    turns: tuple[tuple[int, int], ...]
    logprobs: np.ndarray
    truncated: bool
    is_trained: bool
    environment_reward: float
    metrics: Mapping[str, float]
    reward: float
    token_rewards: np.ndarray

    @property
    def num_tokens(self) -> int:
        """How many tokens were sampled: T."""
        return len(self.places)


Groups = Sequence[Sequence[JudgedRollout]]
"""The rollouts of a batch, problem by problem."""
Given = float | Sequence[float] | np.ndarray
"""What an advantage gives a rollout: one number, or one for each of its T sampled tokens."""
Advantage = Callable[[Groups], Sequence[Sequence[Given]]]
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

    Equal rewards give exactly 0, whatever their mean rounds to.
    """
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / (std(r) + 1e-6)` (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    The paper leaves the kind of std open; this is the sample std (G - 1), as `torch.std` gives it in
    TRL's GRPOTrainer and in verl, whose epsilon it takes too.
    """
    std = sample_std(rewards_G)
    return [centred / (std + _EPSILON) for centred in dr_grpo(rewards_G)]


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean of the others` (Ahmadian et al. 2024, "Back to Basics").

    That is G / (G - 1) times `r_i - mean(r)`. A group of one has no others: 0.
    """
    size = len(rewards_G)
    return [centred * size / max(1, size - 1) for centred in dr_grpo(rewards_G)]


def max_rl(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / mean(r)` (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning").

    The rarer a reward is in its group, the more it counts.
    For rewards of at least 0, such as 1 for success. Equal rewards, all 0 too, give exactly 0.

    Raises:
        TrainingError: a reward is negative.
    """
    if min(rewards_G) < 0:
        raise TrainingError(
            f"advantage = 'max_rl' divides by the mean reward and needs rewards of at least 0, got {min(rewards_G)}. "
            "Shift the rewards, or choose another advantage."
        )
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [centred / mean if centred else 0.0 for centred in dr_grpo(rewards_G)]


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
                for one, value in zip(group, dr_grpo([one.reward for one in group]), strict=True)
            ]
            for group in groups
        ]
    )


def _whitened(values_PG: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    whitened = iter(whiten(list(chain.from_iterable(values_PG))))
    return [[next(whitened) for _ in values_G] for values_G in values_PG]


_OF_REWARDS: dict[str, RewardsAdvantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "max_rl": max_rl}
_OF_BATCHES: dict[str, Advantage] = {"reinforce_pp": reinforce_pp, "reinforce_pp_baseline": reinforce_pp_baseline}


def choose_advantage(name: str) -> Advantage:
    """Return the advantage that `name` stands for: a built-in one, or the user's `module:function`.

    A function of the user gets the rollouts of the batch as a list of lists of `JudgedRollout`, problem by problem,
    and returns as many values: finite numbers, or sequences of one for each sampled token.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """
    if name in _OF_REWARDS:
        of_rewards = _OF_REWARDS[name]
        return lambda groups: [of_rewards([one.reward for one in group]) for group in groups]
    if name in _OF_BATCHES:
        return _OF_BATCHES[name]
    return _user_advantage(name)


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
        try:
            returned = [[_plain(value) for value in group] for group in function([list(group) for group in groups])]
        except Exception as error:
            raise TrainingError(f"advantage = '{name}' failed: {type(error).__name__}: {error}") from error
        sizes, wanted = [len(group) for group in returned], [len(group) for group in groups]
        if sizes != wanted:
            raise TrainingError(f"advantage = '{name}' returned groups of {sizes} values for groups of {wanted}")
        for value, one in zip(chain.from_iterable(returned), chain.from_iterable(groups), strict=True):
            _check(value, one, name)
        return returned

    return advantage


def _plain(value: Given) -> float | np.ndarray:
    numbers = np.asarray(value, dtype=np.float64)
    return numbers if numbers.ndim else float(numbers)


def _check(value: float | np.ndarray, one: JudgedRollout, name: str) -> None:
    """Refuse what is neither one finite number nor one for each sampled token."""
    whose = f"task {one.task_id} of environment '{one.environment}'"
    if isinstance(value, np.ndarray) and value.shape != (one.num_tokens,):
        raise TrainingError(
            f"advantage = '{name}' returned an array of shape {value.shape} for a rollout of {whose} with "
            f"{one.num_tokens} sampled tokens: return one number, or one for each sampled token"
        )
    if not np.isfinite(value).all():
        raise TrainingError(f"advantage = '{name}' returned a number that is not finite for {whose}: {value}")
