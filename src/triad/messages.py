"""What the orchestrator hands to the trainer: batches of rollouts.

A batch is one msgpack map (https://msgpack.org), readable with any msgpack library; field names
are the attribute names below.
"""

from __future__ import annotations

import msgspec

BATCH_FORMAT = 1


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a rollout were sampled by policy `version`, as the engine reports."""

    version: int
    start: int
    end: int


class Rollout(msgspec.Struct, kw_only=True):
    """One finished session.

    Attributes:
        environment: name of the environment.
        task_id: position of the task in the environment's endless sequence.
        sample_index: 0 .. group_size - 1.
        token_ids: the whole session, prompt first.
        loss_mask: per token, whether the policy sampled it.
        logprobs: per token, the sampler's log-probability at `temperature`; 0.0 where not sampled.
        versions: which policy sampled which tokens.
        reward: scored reward.
        truncated: the session ended because a token limit was reached.
        metrics: further numbers of the environment, such as `exact`.
    """

    environment: str
    task_id: int
    sample_index: int
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[VersionSpan]
    reward: float = 0.0
    truncated: bool = False
    metrics: dict[str, float] = {}


class Batch(msgspec.Struct, kw_only=True):
    """What optimizer step `step` trains on.

    Attributes:
        step: 1-based optimizer step.
        policy_version: the version that the schedule asked for.
        temperature: softmax temperature of the sampler.
        rollouts: in a fixed order (problem, then sample), independent of timing.
        metrics: the orchestrator's numbers about this batch; the trainer writes them out with its own.
    """

    format: int = BATCH_FORMAT
    step: int
    policy_version: int
    temperature: float
    rollouts: list[Rollout]
    metrics: dict[str, float] = {}
