"""Rollouts as the orchestrator makes them, for tests that only care for some of what they hold."""

from collections.abc import Sequence
from typing import Any

from holdfast.protocol.rollouts import Logprobs, LossMask, Rollout, TokenIds, VersionSpan


def sampled_rollout(reward: float, *, sampled: int = 2, **fields: Any) -> Rollout:
    """Return a rollout of a prompt of one token, and so many sampled ones."""
    plain: dict[str, Any] = {
        "environment": "a", "task_id": 0, "sample_index": 0, "token_ids": TokenIds([1] * (sampled + 1)),
        "loss_mask": LossMask([False] + [True] * sampled), "logprobs": Logprobs([0.0] * (sampled + 1)), "versions": [],
    }  # fmt: skip
    return Rollout(**plain | fields, reward=reward)


def answered(
    prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], *, version: int = 0, **fields: Any
) -> Rollout:
    """Return a rollout of a prompt and an answer, all of which one version sampled with these log-probabilities."""
    begin, end = len(prompt), len(prompt) + len(answer)
    plain: dict[str, Any] = {
        "environment": "e", "task_id": 0, "sample_index": 0, "versions": [VersionSpan(version, begin, end)],
        "token_ids": TokenIds([*prompt, *answer]), "loss_mask": LossMask([False] * begin + [True] * len(answer)),
        "logprobs": Logprobs([0.0] * begin + [*logprobs]),
    }  # fmt: skip
    return Rollout(**plain | fields)
