"""What the orchestrator hands to the trainer: batches of rollouts.

A batch is one msgpack map (https://msgpack.org), readable with any msgpack library; field names
are the attribute names below. Numbers per token are bytes: see `holdfast.shared.wire.arrays` and docs/journal.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import msgspec

from holdfast.shared.wire.arrays import Logprobs, LossMask, Rewards, TokenIds, decode_packed, encode_packed
from holdfast.shared.wire.sampling import PLAIN_SAMPLING, Sampling

BATCH_FORMAT = 7

DropReason = Literal[
    "zero_signal", "environment_error", "prompt_too_long", "timeout", "crash", "memory",
    "judge_away", "judge_refused", "judge_unreadable",
]  # fmt: skip
"""Why the group of a task is not trained: all its rewards are equal, its environment failed, its prompt leaves no room
for a sampled token, the environment took too long, ended its worker process, or used more memory than it may; or a
judge was away for too long, refused what it was asked, or gave a reply that cannot be read."""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a rollout were sampled by policy `version`, as the engine reports."""

    version: int
    start: int
    end: int


class StepRewards(msgspec.Struct, frozen=True):
    """Rewards for parts of a session, such as its turns, beside that for the whole.

    Attributes:
        places: of the last token of every part, from the first token of the session on, in order.
        rewards: as many.
    """

    places: TokenIds
    rewards: Rewards


class Rollout(msgspec.Struct, kw_only=True):
    """One finished session.

    Attributes:
        environment: name of the environment.
        task_id: position of the task in the environment's endless sequence.
        sample_index: 0 .. group_size - 1.
        token_ids: the whole session, prompt first: its branches, one after the other.
        loss_mask: per token, whether the policy sampled it.
        logprobs: per token, the sampler's log-probability in the distribution `sampling`; 0.0 where not sampled.
        sampling: the distribution that its tokens were sampled from.
        level: of the environment's curriculum that the task was drawn from; None without one.
        versions: which policy sampled which tokens; empty where a teacher did.
        reward: scored reward of the whole.
        truncated: the session ended because a token limit was reached.
        metrics: further numbers of the environment, such as `exact`.
        reference_logprobs: per token, the teacher's log-probability at temperature 1; 0.0 where not sampled.
            None without a teacher that judges.
        step_rewards: rewards of turns or tokens, beside `reward`; None where the environment gives none.
        branch_starts: where in `token_ids` each branch begins: a sequence of its own to a model, whose first tokens are
            a prompt. More than one where the chat template wrote the history anew.
    """

    environment: str
    task_id: int
    sample_index: int
    token_ids: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    versions: list[VersionSpan]
    sampling: Sampling = PLAIN_SAMPLING
    level: int | None = None
    reward: float = 0.0
    truncated: bool = False
    metrics: dict[str, float] = {}
    reference_logprobs: Logprobs | None = None
    step_rewards: StepRewards | None = None
    branch_starts: tuple[int, ...] = (0,)

    @property
    def branches(self) -> list[slice]:
        """What of `token_ids`, and of all that follows the tokens, is each branch."""
        return [slice(*ends) for ends in pairwise([*self.branch_starts, len(self.token_ids)])]


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was drawn for a batch, and whose group is not in it.

    Attributes:
        environment: name of the environment.
        task_id: position of the task in the environment's endless sequence.
        reason: why.
        rollouts: sessions that were begun.
        tokens: their tokens, prompts included.
        detail: what the environment said, if it failed.
    """

    environment: str
    task_id: int
    reason: DropReason
    rollouts: int
    tokens: int
    detail: str = ""


class Batch(msgspec.Struct, kw_only=True):
    """What optimizer step `step` trains on.

    Attributes:
        step: 1-based optimizer step.
        policy_version: the version that the schedule asked for.
        weights_digest: `shared.files.weights_digest` of the weights of that version that sampled it; empty where a
            teacher did.
        teacher_digest: of the teacher that sampled or judged it; empty without one.
        rollouts: in a fixed order (problem, then sample), independent of timing.
        dropped: tasks that were drawn for this batch and are not in it, in the order of the draw.
        metrics: the orchestrator's numbers about this batch; the trainer writes them out with its own.
    """

    format: int = BATCH_FORMAT
    step: int
    policy_version: int
    weights_digest: str
    teacher_digest: str = ""
    rollouts: list[Rollout]
    dropped: list[Dropped] = []
    metrics: dict[str, float] = {}


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_packed)
_decoder = msgspec.msgpack.Decoder(Batch, dec_hook=decode_packed)


class _Versioned(msgspec.Struct):
    format: int


def encode_batch(batch: Batch) -> bytes:
    """Return the bytes of a batch's file."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """Return the batch in the bytes of its file.

    Raises:
        ValueError: it is damaged, or has another format than `BATCH_FORMAT`; says which.
    """
    found = msgspec.msgpack.decode(data, type=_Versioned).format
    if found != BATCH_FORMAT:
        raise ValueError(f"it has format {found}; this version reads format {BATCH_FORMAT}")
    return _decoder.decode(data)
