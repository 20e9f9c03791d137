"""Rollouts as advantages see them, for tests that only care for some of what they hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.config.rl_trainer import TrainerConfig
from holdfast.trainer.rl.assign_advantages import Advantage, build_named_advantage
from holdfast.trainer.rl.token_rewards import Groups, ScoredRollout
from tests.builders.advantage_settings import NEEDED


def advantage_of(name: str, **settings: Any) -> Advantage:
    config = TrainerConfig.model_validate({"advantage": {"type": name, **settings}} | NEEDED.get(name, {}))
    return build_named_advantage(config.advantage, config)


def scored_rollout(reward: float, num_tokens: int = 3, **fields: Any) -> ScoredRollout:
    """A rollout of a prompt of two tokens and `num_tokens` sampled ones, the reward at the last."""
    token_rewards = np.zeros(num_tokens)
    token_rewards[-1:] = reward
    values: dict[str, Any] = {
        "environment": "e", "task_id": 0, "token_ids": np.arange(2 + num_tokens, dtype=np.int32),
        "places": np.arange(2, 2 + num_tokens), "turns": ((0, num_tokens),) if num_tokens else (),
        "logprobs": np.full(num_tokens, -1.0, dtype=np.float32), "truncated": False, "is_trained": True,
        "old_logprobs": np.full(num_tokens, -1.1), "reference_logprobs": np.full(num_tokens, -1.0),
        "environment_reward": reward, "metrics": {"other": -reward}, "reward": reward,
        "step_ends": np.zeros(0, dtype=int), "step_rewards": np.zeros(0), "token_rewards": token_rewards,
    }  # fmt: skip
    return ScoredRollout(**values | fields)


def scored_groups(rewards_PG: Sequence[Sequence[float]]) -> Groups:
    return [[scored_rollout(reward, task_id=task) for reward in group] for task, group in enumerate(rewards_PG)]


def step_rollout(reward: float, steps: dict[int, float], num_tokens: int = 4) -> ScoredRollout:
    """A rollout with rewards of the parts that end with these tokens."""
    token_rewards = np.zeros(num_tokens)
    token_rewards[list(steps)] = list(steps.values())
    token_rewards[-1] += reward
    return scored_rollout(
        reward, num_tokens, token_rewards=token_rewards,
        step_ends=np.array(list(steps), dtype=int), step_rewards=np.array(list(steps.values())),
    )  # fmt: skip
