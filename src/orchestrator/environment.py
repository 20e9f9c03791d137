"""What an environment is: tasks from seeds, sessions that only grow, scores for a whole group.

Minimal environment:

    class Shout(Environment):
        def make_task(self, seed: TaskSeed) -> Task:
            word = seed.random().choice(["yes", "no"])
            return Task(prompt=[Message("user", word)], answer=word.upper())

        async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
            return [Score(float(session.completion == task.answer)) for session in sessions]

Several turns: override `run`, and take turns between `sample` and `append_messages`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from orchestrator.seeds import TaskSeed
from orchestrator.tokenizer import Message, Tokenizer
from triad.arrays import Logprobs, LossMask, TokenIds
from triad.messages import VersionSpan

__all__ = ["Completion", "Environment", "Message", "Score", "Session", "SessionFull", "Task", "TaskSeed"]


class Completion(msgspec.Struct):
    """What an engine sampled in one turn.

    Attributes:
        token_ids: sampled ids, the stop token included.
        logprobs: their log-probabilities at the sampling temperature.
        finish_reason: `stop`, `length` or `abort`.
        versions: which policy sampled which of them; positions count from the first sampled token.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str
    versions: list[VersionSpan]


@dataclass(frozen=True)
class Task:
    """One problem. Subclass it to carry more than an answer.

    Attributes:
        prompt: messages for the chat template, or text that is tokenised as it stands.
        answer: the right answer, for `score`.
    """

    prompt: str | Sequence[Message]
    answer: str = ""


@dataclass(frozen=True)
class Score:
    """What a rollout earned.

    Attributes:
        reward: any finite number.
        metrics: further numbers of this rollout; their means go to the metrics of the step.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


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
        self._tokenizer = tokenizer
        self._sample_turn = sample_turn
        self._seq_len = seq_len
        self._max_tokens = max_tokens

    @property
    def completion(self) -> str:
        """The text of the last sampled turn; empty before the first."""
        return self.texts[-1] if self.texts else ""

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self._seq_len - len(self.token_ids)

    async def sample(self) -> str:
        """Let the policy continue, and return the text of what it sampled.

        Raises:
            SessionFull: there is no room for a single token.
        """
        if self.room < 1:
            raise SessionFull
        # A copy: the session may grow while others' requests share these ids.
        turn = await self._sample_turn(self.token_ids.tolist(), len(self.texts), min(self._max_tokens, self.room))
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        self.loss_mask += LossMask(b"\1" * len(turn.token_ids))
        self.logprobs += turn.logprobs
        self.versions += [VersionSpan(span.version, start + span.start, start + span.end) for span in turn.versions]
        self.truncated = self.truncated or turn.finish_reason == "length"
        self.texts.append(self._tokenizer.decode(turn.token_ids))
        return self.texts[-1]

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages after a sampled turn, and open the policy's next turn.

        Raises:
            SessionFull: they leave no room for a sampled token.
        """
        self._append(self._tokenizer.continuation(messages, last_token_id=self.token_ids[-1]))

    def append_text(self, text: str) -> None:
        """Append text as it stands, without the chat template.

        Raises:
            SessionFull: it leaves no room for a sampled token.
        """
        self._append(self._tokenizer.encode(text))

    def _append(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) >= self.room:
            raise SessionFull
        self.token_ids += TokenIds(token_ids)
        self.loss_mask += LossMask(bytes(len(token_ids)))
        self.logprobs += Logprobs([0.0] * len(token_ids))


class Environment:
    """Base of all environments. Constructor arguments come from `environments.args` of the config."""

    def make_task(self, seed: TaskSeed) -> Task:
        """Return the task that `seed` names: a pure function, so that any task can be made again."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_task(seed)")

    async def run(self, session: Session, task: Task) -> None:
        """Play one session of `task`; its prompt is there already. By default: one sampled turn."""
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return one score per session; all sessions of one group come together, so they can be compared."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(task, sessions)")
