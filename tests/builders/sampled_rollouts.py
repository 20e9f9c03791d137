"""Rollouts as the orchestrator makes them, for tests that only care for some of what they hold."""

from typing import Any

from holdfast.protocol.rollouts import Logprobs, LossMask, Rollout, TokenIds


def sampled_rollout(reward: float, *, sampled: int = 2, **fields: Any) -> Rollout:
    """Return a rollout of a prompt of one token, and so many sampled ones."""
    plain: dict[str, Any] = {
        "environment": "a", "task_id": 0, "sample_index": 0, "token_ids": TokenIds([1] * (sampled + 1)),
        "loss_mask": LossMask([False] + [True] * sampled), "logprobs": Logprobs([0.0] * (sampled + 1)), "versions": [],
    }  # fmt: skip
    return Rollout(**plain | fields, reward=reward)
