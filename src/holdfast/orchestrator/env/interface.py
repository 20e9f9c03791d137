"""Environments: tasks from seeds, sessions that only grow, scores for a whole group.

Minimal environment:

    class Shout(Environment):
        def make_task(self, seed: TaskSeed) -> Task:
            word = seed.random().choice(["yes", "no"])
            return Task(prompt=[Message("user", word)], answer=word.upper())

        async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
            return [Score(float(session.completion == task.answer)) for session in sessions]

Several turns: override `run`, and take turns between `sample` and `append_messages`. Tools that the policy may call:
set `tools`. `make_task` and `score` may be `async` or not; a message may be written as
`{"role": "user", "content": "..."}` too.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.chat.messages import MORE_KEYS, Message, as_dict, check_messages
from holdfast.errors import DataError, shown
from holdfast.orchestrator.state import TaskSeed
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Logprobs, LossMask, TokenIds, VersionSpan

if TYPE_CHECKING:
    from holdfast.chat.template import ChatMessage
    from holdfast.chat.tokenizer import Tokenizer
    from holdfast.orchestrator.env.tools import Parser, ToolCall

__all__ = ["Environment", "Message", "Score", "Session", "SessionFull", "Task", "TaskSeed"]


@dataclass(frozen=True)
class Task:
    """One problem. Subclass it to carry more than an answer.

    Attributes:
        prompt: messages for the chat template, or text, before which some tokenizers put BOS.
        answer: the right answer, for `score`.
    """

    prompt: str | Sequence[Message | ChatMessage]
    answer: str = ""


class SessionTools(Protocol):
    """The tools of an environment, as a session uses them (`tool_loop.ToolUse`, which imports this module)."""

    @property
    def parse(self) -> Parser: ...

    @property
    def max_turns(self) -> int: ...

    @property
    def schemas(self) -> list[dict[str, Any]]: ...

    def message(self, text: str, call: ToolCall, *, turn: int, number: int) -> ChatMessage: ...

    async def answer(self, call: ToolCall, session: Session) -> tuple[str, str | None]: ...


def as_text(value: Any) -> str:
    """Return `value`. Raises TypeError if it is not text, ValueError if it has half a surrogate pair."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {shown(value)} ({type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is {value[error.start]!a}, half of a surrogate pair") from None
    return value


def as_messages(messages: Any) -> list[Message | ChatMessage]:
    """Return messages, which may be given as dicts. Raises TypeError or ValueError that names the wrong message."""
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
    contents = [message.content if isinstance(message, Message) else message.get("content") for message in messages]
    return sum(len(content) for content in contents if isinstance(content, str))


class _StrictMessage(Message, frozen=True, forbid_unknown_fields=True):
    """A message from a dict."""


class HistoryRewritten(DataError):
    """The chat template would rewrite earlier turns, and no branch can begin."""


class SessionFull(Exception):
    """The session has no room for another token; the rollout ends and counts as truncated."""


# (prompt ids, turn from 0, most tokens) -> what an engine sampled
SampleTurn = Callable[[list[int], int, int], Awaitable[Completion]]


class Session:
    """One conversation with the policy, as token ids, which grows only at its end.

    Sampled ids are never decoded and tokenised again, so training sees what the policy did. If the chat template
    rewrites the history, such as without the thoughts of earlier turns, the session splits. A new branch begins after
    the ids so far, with the prompt that the template makes of the chat. From then on the policy sees only this branch.

    Attributes:
        truncated: a token limit ended a turn or the session.
        finish_reason: why the last sampled turn ended: `length` (a token limit), or `stop` (its end token, or a text of
            `sampling.stop`, which the turn keeps); empty before the first.
        task: None if there is none.
        state: for the environment, such as what its tools found; not saved.
        tool_counts: calls of tools (`calls`), failures by reason (`failed/raised`, ...), and calls after which no turn
            could follow (`unanswered`).
        request_counts: requests of a harness: `answered`, and refused by reason (`refused/history`, ...); None without
            a harness.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        tokenizer: Tokenizer,
        sample_turn: SampleTurn,
        seq_len: int,
        max_tokens: int,
        task: Task | None = None,
        tool_use: SessionTools | None = None,
        keeps_history: bool = False,
        max_branches: int = 8,
    ) -> None:
        self._token_ids = TokenIds(prompt_ids)
        self._loss_mask = LossMask(bytes(len(prompt_ids)))
        self._logprobs = Logprobs([0.0] * len(prompt_ids))
        self._versions: list[VersionSpan] = []
        self._texts: list[str] = []
        self.truncated = False
        self.finish_reason = ""
        self._at_end: list[Callable[[], None]] = []
        self._turn_ends: list[int] = []
        self._last_turn: Sequence[int] = ()
        self._raw_text: str | None = None
        self._is_turn_open = True  # the policy's turn is still empty
        self.is_sampling = False
        self._is_over = False
        self.tokenizer = tokenizer
        self._sample_turn = sample_turn
        self._seq_len = seq_len
        self._max_tokens = max_tokens
        self.task = task
        self.state: dict[str, Any] = {}
        self.tool_counts: Counter[str] = Counter()
        self.request_counts: Counter[str] | None = None
        self._tool_use = tool_use
        self._schemas = tool_use.schemas if tool_use else None
        self._branch_starts = [0]
        self._max_branches = max_branches
        # The chat of `begin`; None if the session began with its task.
        self._begun_with: list[Message | ChatMessage] | None = None
        # The chat after the prompt, which the template may rewrite; None if that does not matter.
        self._said: list[ChatMessage] | None = None if keeps_history else []

    # Copies, so that an environment cannot change by accident what is trained on.

    @property
    def token_ids(self) -> TokenIds:
        """The whole session, prompt first: its branches, one after the other."""
        return TokenIds(self._token_ids.tobytes())

    @property
    def loss_mask(self) -> LossMask:
        """Per token, whether the policy sampled it."""
        return LossMask(self._loss_mask.tobytes())

    @property
    def logprobs(self) -> Logprobs:
        """Per token, the engine's log-probability; 0.0 if not sampled."""
        return Logprobs(self._logprobs.tobytes())

    @property
    def versions(self) -> list[VersionSpan]:
        """Which policy sampled which tokens."""
        return [*self._versions]

    @property
    def texts(self) -> list[str]:
        """The text of every sampled turn."""
        return [*self._texts]

    @property
    def completion(self) -> str:
        """The text of the last sampled turn; empty before the first."""
        return self._texts[-1] if self._texts else ""

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The end of every sampled turn in `token_ids`."""
        return tuple(self._turn_ends)

    @property
    def branch_starts(self) -> tuple[int, ...]:
        """The first place of every branch in `token_ids`: (0,) without a split."""
        return tuple(self._branch_starts)

    @property
    def room(self) -> int:
        """How many more tokens fit into the branch."""
        return self._seq_len - (len(self._token_ids) - self._branch_starts[-1])

    def begin(self, messages: Sequence[Message | ChatMessage], *, tools: Sequence[Any] | None = None) -> None:
        """Give a session without a prompt its prompt; `tools` are JSON schemas for the template.

        Raises SessionFull if no sampled token fits after it, DataError or TypeError if the template refuses the chat.
        """
        self._require_idle("begin()")
        if self._token_ids:
            raise RuntimeError("begin() is for a session without a prompt, and this one has one: use append_messages()")
        messages = as_messages(messages)
        self._require_room(num_characters(messages), self._seq_len)
        schemas = list(tools) if tools else None
        self._append(self.tokenizer.prompt(messages, tools=schemas))
        self._begun_with, self._schemas = messages, schemas

    async def sample(self, *, max_tokens: int | None = None) -> str:
        """Let the policy continue by at most `max_tokens` (default: `sampling.max_tokens`); return the sampled text.

        Raises SessionFull if no token fits, RuntimeError if this session is being sampled already,
        TypeError or ValueError if `max_tokens` is not an integer from 1."""
        self._require_idle("sample()")
        wanted = self._max_tokens if max_tokens is None else operator.index(max_tokens)
        if wanted < 1:
            raise ValueError(f"sample(max_tokens={wanted}) leaves no token to sample: allowed are integers from 1")
        if self.room < 1:
            raise SessionFull(f"there is no room for another token in the {self._seq_len} of the session (seq_len)")
        most = min(self._max_tokens, self.room, wanted)
        self.is_sampling = True
        try:
            seen = self._token_ids[self._branch_starts[-1] :].tolist()
            turn = await self._sample_turn(seen, len(self._texts), most)
        finally:
            self.is_sampling = False
        # A turn without its end token continues, also after a stop text.
        is_same_turn = not self._is_turn_open and self._token_ids[-1] not in self.tokenizer.stop_token_ids
        self._is_turn_open = False
        start = len(self._token_ids)
        self._grow(turn.token_ids, LossMask(b"\1" * len(turn.token_ids)), turn.logprobs)
        self._versions += [span.moved(start) for span in turn.versions]
        self.finish_reason = turn.finish_reason
        self.truncated = self.truncated or turn.finish_reason == "length"
        self._turn_ends.append(len(self._token_ids))
        self._texts.append(self.tokenizer.decode(turn.token_ids))
        self._last_turn, self._raw_text = turn.token_ids, None
        if self._said is not None:
            before = self._said.pop()["content"] if is_same_turn else ""
            self._said.append({"role": "assistant", "content": before + self.raw_completion})
        return self._texts[-1]

    async def answer_tool_calls(self) -> bool:
        """Run the tools that the last turn called, in order, and append their answers.

        Return whether there is another turn to sample: not without calls, or after `max_turns`. Raises SessionFull if
        the answers leave no room; RuntimeError without a sampled turn or without `tools`."""
        self._require_idle("answer_tool_calls()")
        if self._tool_use is None or self._is_turn_open:
            why = "nothing was sampled" if self._tool_use else "the environment has no `tools`"
            raise RuntimeError(f"answer_tool_calls(): {why}")
        use, turn = self._tool_use, len(self._texts)
        calls = use.parse(self.raw_completion)
        self.tool_counts["calls"] += len(calls)
        if not calls or turn >= use.max_turns:
            self.tool_counts["unanswered"] += len(calls)
            return False
        answers: list[ChatMessage] = []
        for number, call in enumerate(calls, start=1):
            text, failure = await use.answer(call, self)
            if failure is not None:
                self.tool_counts[f"failed/{failure}"] += 1
            answers.append(use.message(text, call, turn=turn, number=number))
        self.append_messages(answers)
        return True

    @property
    def raw_completion(self) -> str:
        """The text of the last sampled turn with its special tokens, except its end token."""
        if self._raw_text is None:
            sampled = self._last_turn
            ends = bool(sampled) and sampled[-1] in self.tokenizer.stop_token_ids
            self._raw_text = self.tokenizer.decode(sampled[: len(sampled) - ends], skip_special_tokens=False)
        return self._raw_text

    def append_messages(self, messages: Sequence[Message | ChatMessage]) -> None:
        """Append messages after a sampled turn, and open the policy's next turn, in a new branch if necessary.

        Raises SessionFull if no sampled token fits after them, or there would be too many branches. Raises
        HistoryRewritten if the template would rewrite a session that began with text. Raises RuntimeError if nothing
        was sampled since the last messages, or the session is being sampled."""
        self._require_idle("append_messages()")
        if self._is_turn_open:
            raise RuntimeError(
                "append_messages() before the policy said anything would close an empty turn: append all messages "
                "in one call, or await session.sample() first"
            )
        messages = as_messages(messages)
        self._require_room(num_characters(messages), self._seq_len)
        tools, last = self._schemas, self._token_ids[-1]
        around = self.tokenizer.around_assistant(messages, tools=tools)
        more = self.tokenizer.continuation(messages, last_token_id=last, tools=tools, around=around)
        if self._said is None:
            self._append(more)
        else:
            prompt = self._prompt_messages()
            before = [*(prompt or [Message("user", ".")]), *self._said]
            if not self.tokenizer.rewrites(before, messages, tools=tools, around=around):
                self._append(more)
            elif prompt is None:
                raise HistoryRewritten(
                    f"before these messages the chat template of '{self.tokenizer.name}' rewrites earlier turns, such "
                    "as without thoughts, and a session that began with text cannot begin a new branch. Give the "
                    'prompt as messages, or set `history = "keep"` to continue after the turns as they were sampled.'
                )
            else:
                self._begin_branch(self.tokenizer.prompt([*before, *messages], tools=tools))
            self._said += map(as_dict, messages)
        self._is_turn_open = True

    def _prompt_messages(self) -> list[Message | ChatMessage] | None:
        """Return the messages that the session began with; None for text."""
        if self._begun_with is not None or self.task is None or isinstance(self.task.prompt, str):
            return self._begun_with
        return as_messages(self.task.prompt)

    def _begin_branch(self, prompt_ids: Sequence[int]) -> None:
        if len(self._branch_starts) >= self._max_branches:
            raise SessionFull(
                f"the chat template of '{self.tokenizer.name}' rewrites earlier turns before these messages, and the "
                f"session has its {self._max_branches} branches (max_branches)"
            )
        if len(prompt_ids) >= self._seq_len:
            raise SessionFull(
                f"the chat so far has {len(prompt_ids)} tokens, which leave no room for a sampled token in the "
                f"{self._seq_len} of a branch (seq_len)"
            )
        self._branch_starts.append(len(self._token_ids))
        self._append(prompt_ids)

    def append_text(self, text: str) -> None:
        """Append text as it is, without the chat template. Raises SessionFull if no sampled token fits after it."""
        self._require_idle("append_text()")
        self._require_room(len(as_text(text)), self.room)
        self._append(self.tokenizer.encode_after(text))
        self._is_turn_open = False
        self._said = None  # not a chat any more

    @property
    def has_tools(self) -> bool:
        return self._tool_use is not None

    def at_end(self, leave: Callable[[], None]) -> None:
        """Have `leave` called after the session has been played, such as to leave a server."""
        self._at_end.append(leave)

    def leave(self) -> None:
        while self._at_end:
            self._at_end.pop()()

    def end(self) -> None:
        """Refuse to sample or append from now on."""
        self._is_over = True

    def _require_idle(self, wanted: str) -> None:
        if self._is_over:
            raise RuntimeError(f"{wanted} after score() has returned, or its group has failed: await all before")
        if self.is_sampling:
            raise RuntimeError(
                f"{wanted} while a sample() of the same session goes on would mix their turns: await one after the "
                "other, and gather only over sessions"
            )

    def _require_room(self, characters: int, room: int) -> None:
        if self.tokenizer.is_too_long(characters, room=room):
            raise self._full(f"{characters} more characters")

    def _full(self, more: str) -> SessionFull:
        return SessionFull(f"{more} leave no room for a sampled token in the {self._seq_len} of the session (seq_len)")

    def _append(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) >= self.room:
            raise self._full(f"{len(token_ids)} more tokens")
        self._grow(TokenIds(token_ids), LossMask(bytes(len(token_ids))), Logprobs([0.0] * len(token_ids)))

    def _grow(self, token_ids: TokenIds, loss_mask: LossMask, logprobs: Logprobs) -> None:
        self._token_ids.extend(token_ids)
        self._loss_mask.extend(loss_mask)
        self._logprobs.extend(logprobs)


@dataclass(frozen=True)
class Score:
    """The score of a rollout.

    Attributes:
        reward: a finite number of Python, NumPy or torch.
        metrics: further numbers of this rollout, for the metrics of the step.
        turn_rewards: one for each sampled turn, in addition to `reward`.
        token_rewards: one for each sampled token, instead of `turn_rewards`.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = None
    token_rewards: Sequence[float] | None = None


class Environment:
    """Base of all environments. Constructor arguments come from `environments.args` of the config.

    Attributes:
        tools: functions or methods that the policy may call, with docstring and annotations, sync or `async`. A
            parameter annotated with `Session` gets the session.
        num_tasks: of different tasks, such as rows of a file; None: no end.
    """

    tools: Sequence[Callable[..., Any]] = ()
    num_tasks: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Give every call of `make_task` a fresh seed, so that a second call gives the same task."""
        super().__init_subclass__(**options)
        if "make_task" in vars(cls):
            cls.make_task = _with_fresh_seed(cls.make_task)

    def make_task(self, seed: TaskSeed) -> Task:
        """Return the task of `seed`: a pure function, so that any task can be made again."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_task(seed)")

    async def run(self, session: Session, task: Task) -> None:
        """Play one session of `task`, which has its prompt already.

        By default: one sampled turn, or with `tools` at most `max_turns`, as long as the policy calls tools."""
        await session.sample()
        while session.has_tools and await session.answer_tool_calls():
            await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return one score per session of a group, which may be compared."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(task, sessions)")


def _with_fresh_seed(make_task: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_task)
    def make(self: Environment, seed: TaskSeed) -> Any:
        return make_task(self, seed.fresh())

    return make
