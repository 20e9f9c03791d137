"""Batches of rollouts, as the orchestrator hands them to the trainer: fields, packed arrays, and checks.

A batch is one msgpack map (https://msgpack.org), readable with any msgpack library. Field names are the attribute names
below. Numbers per token are packed bytes, not lists of Python numbers; docs/files.md describes them:

    TokenIds    int32
    Logprobs    float32, the precision that engines compute them in and trainers read them in
    LossMask    uint8, 0 or 1
    Rewards     float64, so that an environment's rewards stay exact

On the wire and on disk each array is its items, little-endian, as a msgpack `bin`. In memory each is an `array.array`,
which numpy and torch read without copying. The checks refuse anything that no policy can have sampled.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import msgspec

from holdfast.errors import DataError

if sys.byteorder != "little":  # untested: needs a big-endian machine
    raise ImportError("holdfast runs on little-endian machines only: its files hold numbers in that order")


class _Packed(array):
    item: ClassVar[str]

    def __new__(cls, values: bytes | Sequence[float] = b"") -> Self:
        """Return an array of numbers, or of the bytes of their items. Raise ValueError if a value does not fit the item
        type, or the bytes hold part of an item."""
        if not isinstance(values, bytes):
            try:
                values = struct.pack(f"{len(values)}{cls.item}", *values)  # half the time of array(item, values)
            except (struct.error, OverflowError) as error:
                raise ValueError(f"not {cls.__name__}: {error}") from None
        return super().__new__(cls, cls.item, values)


class TokenIds(_Packed):
    """Token ids, an `array.array` of int32."""

    item = "i"


class Logprobs(_Packed):
    """Log-probabilities, an `array.array` of float32."""

    item = "f"


class LossMask(_Packed):
    """Whether the policy sampled a token, uint8: 0 or 1."""

    item = "B"

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return self.tobytes().count(1)

    @property
    def num_stretches(self) -> int:
        """How many stretches of tokens the policy sampled without a break."""
        return (b"\0" + self.tobytes()).count(b"\0\1")


class Rewards(_Packed):
    """Rewards of tokens, float64."""

    item = "d"


def encode_packed(value: Any) -> memoryview:
    """Return the bytes of a packed array: what msgspec's msgpack encoders need as `enc_hook`."""
    if isinstance(value, _Packed):
        return memoryview(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be encoded")


def decode_packed(kind: type[Any], value: Any) -> Any:
    """Return a packed array from its bytes, or from the list of numbers that JSON has: `dec_hook` for msgspec. Raise
    ValueError if `value` is neither, or does not fit."""
    if issubclass(kind, _Packed) and isinstance(value, bytes | list):
        return kind(value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")


def list_packed(value: _Packed) -> list[int] | list[float] | list[bool]:
    """Return the numbers of a packed array, for a mask as booleans: `enc_hook` for text formats."""
    return [bool(item) for item in value] if isinstance(value, LossMask) else value.tolist()


class Sampling(msgspec.Struct, frozen=True):
    """softmax(logits / temperature), cut to its likelier tokens and normalised again.

    The cuts apply in this order, each to the remaining tokens. The likeliest token always stays.

    Attributes:
        temperature: softmax temperature.
        min_p: tokens less likely than this times the likeliest are cut; 0: none.
        top_k: all but the k likeliest are cut; 0: none.
        top_p: all are cut but the fewest likeliest whose probabilities sum to this; 1: none.
        stop: texts that end a turn; they do not change the distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def distribution(self) -> Sampling:
        """The same without stop texts."""
        return msgspec.structs.replace(self, stop=())

    @property
    def is_truncated(self) -> bool:
        """Whether anything can be cut."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def whole(self) -> Sampling:
        """Return the same without cuts."""
        return Sampling(self.temperature)

    def __str__(self) -> str:
        """Return how people write it, such as `temperature 0.7, top_p 0.9`."""
        cuts = [f"{name} {value:g}" for name, value, none in (
            ("top_p", self.top_p, 1), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0)
        ) if value != none]  # fmt: skip
        ends = [f"stop {json.dumps(self.stop, ensure_ascii=False)}"] if self.stop else []
        return ", ".join([f"temperature {self.temperature:g}", *cuts, *ends])


PLAIN_SAMPLING = Sampling()
"""At temperature 1, from all tokens."""


BATCH_FORMAT = 8

DropReason = Literal[
    "zero_signal", "environment_error", "prompt_too_long", "timeout", "crash", "memory",
    "judge_away", "judge_refused", "judge_unreadable",
]  # fmt: skip
"""Why the group of a task is not trained. All its rewards are equal, its environment failed, or its prompt leaves no
room for a sampled token. Or the environment took too long, ended its worker process, or used more memory than it may.
Or a judge was away for too long, refused the question, or gave an unreadable reply."""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a rollout were sampled by policy `version`, as the engine reports. `seed`: of the request
    that sampled them, from the tokens before them."""

    version: int
    start: int
    end: int
    seed: int = 0

    def moved(self, by: int) -> VersionSpan:
        """Return the span of the same tokens `by` places later."""
        return VersionSpan(self.version, self.start + by, self.end + by, self.seed)


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
        right_answer: of the task, as text; empty without one.
        reference_logprobs: per token, the teacher's log-probability at temperature 1; 0.0 where not sampled.
            None without a teacher that judges.
        step_rewards: rewards of turns or tokens, beside `reward`; None without any.
        branch_starts: where in `token_ids` each branch begins: a sequence of its own to a model, whose first tokens are
            a prompt. More than one if the chat template rewrote the history.
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
    right_answer: str = ""
    reference_logprobs: Logprobs | None = None
    step_rewards: StepRewards | None = None
    branch_starts: tuple[int, ...] = (0,)

    @property
    def branches(self) -> list[slice]:
        """The slice of each branch in `token_ids` and the other arrays per token."""
        return [slice(*ends) for ends in pairwise([*self.branch_starts, len(self.token_ids)])]

    def stretches(self, tokens: slice = slice(None)) -> list[tuple[bool, list[int]]]:
        """Return the stretches of `tokens`: whether the policy sampled them, and their ids."""
        pairs = zip(self.loss_mask[tokens], self.token_ids[tokens], strict=True)
        return [(bool(sampled), [token for _, token in found]) for sampled, found in groupby(pairs, itemgetter(0))]


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A task drawn for a batch whose group was dropped.

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


Signal = Literal["sum", "parts"]
ZERO_VARIANCE = "groups/zero_variance"


def has_signal(outcome: list[Rollout] | Dropped, signal: Signal) -> bool:
    """Whether a group has unequal rewards; `signal` says which count, as in `DynamicSamplingConfig`."""
    if isinstance(outcome, Dropped):
        return False
    of_parts = [rollout.step_rewards.rewards if rollout.step_rewards else [] for rollout in outcome]
    rewards = [rollout.reward for rollout in outcome]
    if signal == "sum":
        sums = [math.fsum([reward, *parts]) for reward, parts in zip(rewards, of_parts, strict=True)]
        return min(sums) != max(sums)
    steps = list(chain.from_iterable(of_parts))
    return min(rewards) != max(rewards) or (len(steps) > 0 and min(steps) != max(steps))


def zero_variance(groups: Sequence[list[Rollout]], signal: Signal) -> dict[str, float]:
    """Return the metric of that name: the share of the groups of several rollouts that have no signal."""
    without = [not has_signal(group, signal) for group in groups if len(group) > 1]
    return {ZERO_VARIANCE: statistics.fmean(without)} if without else {}


class Batch(msgspec.Struct, kw_only=True):
    """The rollouts that optimizer step `step` (from 1) trains on.

    Attributes:
        policy_version: the version that the schedule asked for; in rounds, the version that served at the end.
        weights_digest: `run.weights` of the weights of that version that sampled it; empty where a
            teacher did.
        older_digests: the same of each older version that sampled some of it, which only rounds have.
        teacher_digest: of the teacher that sampled or judged it; empty without one.
        rollouts: in a fixed order (problem, then sample), independent of timing.
        dropped: tasks drawn for this batch and dropped, in the order of the draw.
        metrics: the orchestrator's numbers about this batch, which the trainer logs with its own.
    """

    format: int = BATCH_FORMAT
    step: int
    policy_version: int
    weights_digest: str
    older_digests: dict[int, str] = {}
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
    """Return the batch in the bytes of its file. Raise ValueError if it is damaged or not of `BATCH_FORMAT`."""
    found = msgspec.msgpack.decode(data, type=_Versioned).format
    if found != BATCH_FORMAT:
        raise ValueError(f"it has format {found}; this version reads format {BATCH_FORMAT}")
    return _decoder.decode(data)


# Above 0 by no more than the rounding of a log-softmax in float32.
_HIGHEST_LOGPROB = 1e-4


def vocab_size_in(path: Path) -> int:
    """Return how many token ids the model with this config.json has. Raise DataError if it does not say."""
    try:
        config = json.loads(path.read_bytes())
        sizes = [section["vocab_size"] for section in (config, *_sections(config)) if "vocab_size" in section]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not sizes or not isinstance(sizes[0], int):
        raise DataError(f"{path} has no vocab_size: it cannot be told which token ids the model has")
    return sizes[0]


def _sections(config: dict[str, object]) -> list[dict[str, object]]:
    """Return the sections of models that are made of several, the one for text first."""
    return [section for key in ("text_config", "llm_config") if isinstance(section := config.get(key), dict)]


def fault_of_ids(token_ids: Sequence[int], vocab_size: int | None) -> str | None:
    """Return the problem of ids that a model with `vocab_size` tokens (None: any) does not have, or None."""
    if token_ids and min(token_ids) < 0:
        return f"token_ids holds {min(token_ids)}, allowed are 0 and above"
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        return f"token_ids holds {max(token_ids)}, the model has {vocab_size} tokens"
    return None


def fault_of_logprobs(field: str, logprobs: Sequence[float], *, least: float = -math.inf) -> str | None:
    """Return which of the log-probabilities cannot be one, or None."""
    if not logprobs or (
        math.isfinite(sum(logprobs)) and least <= min(logprobs) and max(logprobs) <= _HIGHEST_LOGPROB
    ):  # without a Python loop
        return None
    for logprob in logprobs:
        if not math.isfinite(logprob) or not least <= logprob <= _HIGHEST_LOGPROB:
            lower = "finite numbers" if least == -math.inf else f"numbers from {least:g}"
            return f"{field} holds {logprob:g}, allowed are {lower} up to 0"
    return None


def fault_of_batch(batch: Batch, vocab_size: int | None) -> str | None:
    """Return what of a batch no policy with `vocab_size` tokens (None: unknown) can have sampled, or None."""
    for rollout in batch.rollouts:
        problem = (
            fault_of_ids(rollout.token_ids, vocab_size)
            or fault_of_logprobs("logprobs", rollout.logprobs)
            or fault_of_logprobs("reference_logprobs", rollout.reference_logprobs or [])
        )
        if problem is not None:
            return f"{rollout.environment}, task {rollout.task_id}: {problem}"
    return None
