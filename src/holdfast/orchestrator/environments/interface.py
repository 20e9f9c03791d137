"""What an environment is: tasks from seeds, sessions that only grow, scores for a whole group.

Minimal environment:

    class Shout(Environment):
        def make_task(self, seed: TaskSeed) -> Task:
            word = seed.random().choice(["yes", "no"])
            return Task(prompt=[Message("user", word)], answer=word.upper())

        async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
            return [Score(float(session.completion == task.answer)) for session in sessions]

Several turns: override `run`, and take turns between `sample` and `append_messages`. `make_task` and `score` may be
`async` or not; a message may be written as `{"role": "user", "content": "..."}` too.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.orchestrator.seeds import TaskSeed
from holdfast.shared.chat.messages import MORE_KEYS, Message, as_dict, check_messages
from holdfast.shared.chat.template import ChatMessage
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.errors import DataError
from holdfast.shared.printable import shown
from holdfast.shared.wire.arrays import Logprobs, LossMask, TokenIds
from holdfast.shared.wire.inference_api import Completion
from holdfast.shared.wire.rollouts import VersionSpan

__all__ = ["Environment", "Message", "Score", "Session", "SessionFull", "Task", "TaskSeed"]


@dataclass(frozen=True)
class Task:
    """One problem. Subclass it to carry more than an answer.

    Attributes:
        prompt: messages for the chat template, or text, which the tokenizer begins with BOS where it does so.
        answer: the right answer, for `score`.
    """

    prompt: str | Sequence[Message | ChatMessage]
    answer: str = ""


@dataclass(frozen=True)
class Score:
    """What a rollout earned.

    Attributes:
        reward: any finite number; scalars of NumPy and torch are numbers too.
        metrics: further numbers of this rollout; their means go to the metrics of the step.
        turn_rewards: one for each sampled turn, beside `reward`.
        token_rewards: one for each sampled token, beside `reward`; in the place of `turn_rewards`.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = None
    token_rewards: Sequence[float] | None = None


def as_text(value: Any) -> str:
    """Return `value` if it is text that a tokenizer and a file can take.

    Raises:
        TypeError: it is something else.
        ValueError: it has half a surrogate pair.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {shown(value)} ({type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is {value[error.start]!a}, half of a surrogate pair") from None
    return value


def as_messages(messages: Any) -> list[Message | ChatMessage]:
    """Return messages that may be written as dicts, which may hold more than role and content.

    Raises:
        TypeError, ValueError: they are no list of messages; says which one is not, and why.
    """
    if isinstance(messages, str | Mapping | Message) or not isinstance(messages, Sequence):
        raise TypeError(f"expected text or a list of messages, got {shown(messages)} ({type(messages).__name__})")
    return [_as_message(message, number) for number, message in enumerate(messages, start=1)]


def _as_message(message: Any, number: int) -> Message | ChatMessage:
    try:
        if isinstance(message, Mapping):
            more = {key: value for key, value in message.items() if key in MORE_KEYS}
            rest = {key: value for key, value in message.items() if key not in more}
            message = msgspec.convert(rest, _StrictMessage)
            message = Message(message.role, message.content)
            if more:
                as_text(message.content)
                return check_messages([{**as_dict(message), **more}])[0]
        if not isinstance(message, Message):
            raise TypeError("expected Message(role, content) or a dict of both")
        as_text(message.role)
        as_text(message.content)
    except DataError as error:
        raise TypeError(f"message {number}: {str(error).removeprefix('message 1: ')}") from None
    except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise TypeError(f"message {number} is {shown(message)}: {error}") from None
    return message


def num_characters(messages: Sequence[Message | ChatMessage]) -> int:
    """Return how many characters the messages say."""
    contents = [message.content if isinstance(message, Message) else message.get("content") for message in messages]
    return sum(len(content) for content in contents if isinstance(content, str))


class _StrictMessage(Message, frozen=True, forbid_unknown_fields=True):
    """What a dict must be to be a message."""


class SessionFull(Exception):
    """The session has no room for another token; the rollout ends here and counts as truncated."""


# Prompt ids, turn (from 0) and most tokens -> what an engine sampled.
SampleTurn = Callable[[list[int], int, int], Awaitable[Completion]]


class Session:
    """One conversation with the policy, as token ids. It only ever grows at its end.

    Sampled ids stay as they were sampled, never decoded and tokenised again, so what is trained on
    is what the policy did.

    Attributes:
        token_ids: the whole session, prompt first.
        loss_mask: per token, whether the policy sampled it.
        logprobs: per token, the engine's log-probability; 0.0 where not sampled.
        versions: which policy sampled which tokens.
        texts: the text of every sampled turn.
        truncated: a token limit ended a turn or the session.
    """

    def __init__(
        self, prompt_ids: Sequence[int], *, tokenizer: Tokenizer, sample_turn: SampleTurn, seq_len: int, max_tokens: int
    ) -> None:
        self.token_ids = TokenIds(prompt_ids)
        self.loss_mask = LossMask(bytes(len(prompt_ids)))
        self.logprobs = Logprobs([0.0] * len(prompt_ids))
        self.versions: list[VersionSpan] = []
        self.texts: list[str] = []
        self.truncated = False
        # What an environment cannot reach by accident.
        self._kept = {"token_ids": self.token_ids[:], "loss_mask": self.loss_mask[:], "logprobs": self.logprobs[:]}
        self._kept_versions: list[VersionSpan] = []
        self._turn_ends: list[int] = []
        self._is_turn_open = True  # nothing was said in the policy's turn
        self._is_sampling = False
        self._is_over = False
        self._tokenizer = tokenizer
        self._sample_turn = sample_turn
        self._seq_len = seq_len
        self._max_tokens = max_tokens

    @property
    def completion(self) -> str:
        """The text of the last sampled turn; empty before the first."""
        return self.texts[-1] if self.texts else ""

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Where in `token_ids` every sampled turn ends."""
        return tuple(self._turn_ends)

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self._seq_len - len(self.token_ids)

    async def sample(self) -> str:
        """Let the policy continue, and return the text of what it sampled.

        Raises:
            SessionFull: there is no room for a single token.
            RuntimeError: this session is being sampled already.
        """
        self._require_idle("sample()")
        if self.room < 1:
            raise SessionFull(f"there is no room for another token in the {self._seq_len} of the session (seq_len)")
        self._is_sampling = True
        try:
            turn = await self._sample_turn(self.token_ids.tolist(), len(self.texts), min(self._max_tokens, self.room))
        finally:
            self._is_sampling = False
        self._is_turn_open = False
        start = len(self.token_ids)
        self._grow(turn.token_ids, LossMask(b"\1" * len(turn.token_ids)), turn.logprobs)
        versions = [VersionSpan(span.version, start + span.start, start + span.end) for span in turn.versions]
        self.versions += versions
        self._kept_versions += versions
        self.truncated = self.truncated or turn.finish_reason == "length"
        self._turn_ends.append(len(self.token_ids))
        self.texts.append(self._tokenizer.decode(turn.token_ids))
        return self.texts[-1]

    def append_messages(self, messages: Sequence[Message | ChatMessage]) -> None:
        """Append messages after a sampled turn, and open the policy's next turn.

        Raises:
            SessionFull: they leave no room for a sampled token.
            RuntimeError: nothing was sampled since the prompt, or since messages were appended; or the session is
                being sampled.
        """
        self._require_idle("append_messages()")
        if self._is_turn_open:
            raise RuntimeError(
                "append_messages() before the policy said anything would close an empty turn: append all messages "
                "in one call, or await session.sample() first"
            )
        messages = as_messages(messages)
        self._require_room(num_characters(messages))
        self._append(self._tokenizer.continuation(messages, last_token_id=self.token_ids[-1]))
        self._is_turn_open = True

    def append_text(self, text: str) -> None:
        """Append text as it stands, without the chat template.

        Raises:
            SessionFull: it leaves no room for a sampled token.
            RuntimeError: the session is being sampled.
        """
        self._require_idle("append_text()")
        self._require_room(len(as_text(text)))
        self._append(self._tokenizer.encode_after(text))
        self._is_turn_open = False

    @property
    def is_sampling(self) -> bool:
        """Whether a `sample()` goes on."""
        return self._is_sampling

    def changed(self) -> list[str]:
        """Return the names of attributes that are not what was sampled and appended: an environment changed them."""
        found = [name for name, kept in self._kept.items() if getattr(self, name).tobytes() != kept.tobytes()]
        return found + ["versions"] * (self.versions != self._kept_versions)

    def end(self) -> None:
        """Let nothing more be sampled or appended: the rollout is taken as it stands."""
        self._is_over = True

    def _require_idle(self, wanted: str) -> None:
        if self._is_over:
            raise RuntimeError(f"{wanted} after score() has returned: what a rollout is made of must be awaited before")
        if self._is_sampling:
            raise RuntimeError(
                f"{wanted} while a sample() of the same session goes on would mix their turns: await one after the "
                "other, and gather over sessions only"
            )

    def _require_room(self, characters: int) -> None:
        if self._tokenizer.is_too_long(characters, room=self.room):
            raise SessionFull(
                f"{characters} more characters leave no room for a sampled token in the {self._seq_len} of the session "
                "(seq_len)"
            )

    def _append(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) >= self.room:
            raise SessionFull(
                f"{len(token_ids)} more tokens leave no room for a sampled one in the {self._seq_len} of the session "
                "(seq_len)"
            )
        self._grow(TokenIds(token_ids), LossMask(bytes(len(token_ids))), Logprobs([0.0] * len(token_ids)))

    def _grow(self, token_ids: TokenIds, loss_mask: LossMask, logprobs: Logprobs) -> None:
        for name, more in {"token_ids": token_ids, "loss_mask": loss_mask, "logprobs": logprobs}.items():
            getattr(self, name).extend(more)
            self._kept[name].extend(more)


class Environment:
    """Base of all environments. Constructor arguments come from `environments.args` of the config."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give every `make_task` a seed whose generator is new, so that calling it again gives the same task."""
        super().__init_subclass__(**options)
        if "make_task" in vars(cls):
            cls.make_task = _with_fresh_seed(cls.make_task)

    def make_task(self, seed: TaskSeed) -> Task:
        """Return the task that `seed` names: a pure function, so that any task can be made again."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_task(seed)")

    async def run(self, session: Session, task: Task) -> None:
        """Play one session of `task`; its prompt is there already. By default: one sampled turn."""
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return one score per session; all sessions of one group come together, so they can be compared."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(task, sessions)")


def _with_fresh_seed(make_task: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_task)
    def make(self: Environment, seed: TaskSeed) -> Any:
        return make_task(self, seed.fresh())

    return make
