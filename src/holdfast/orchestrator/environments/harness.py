"""Environments that a harness plays: any program that asks an OpenAI-compatible endpoint for what the policy says.

    class Ask(HarnessEnvironment):
        def make_task(self, seed: TaskSeed) -> Task:
            return Task(prompt="", answer=seed.random().choice(["yes", "no"]))

        async def play(self, endpoint: Endpoint, task: Task) -> float:
            async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                chat = [{"role": "user", "content": f"Say {task.answer}"}]
                answer = await client.chat.completions.create(model=endpoint.model, messages=chat)
            return float(answer.choices[0].message.content == task.answer)

The endpoint keeps the exact token ids of every turn. A rollout is one conversation: each request goes on behind the
messages of the one before and what was answered to it, so it is one sample with one mask, as that of any other
environment.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.orchestrator.environments.chat_protocol import (
    REFUSALS,
    ChatRequest,
    Refused,
    completion_of,
    is_same,
    read_request,
    reply_of,
)
from holdfast.orchestrator.environments.chat_server import MODEL, chat_server
from holdfast.orchestrator.environments.contract import PromptTooLong
from holdfast.orchestrator.environments.interface import Environment, Score, Session, SessionFull, Task
from holdfast.orchestrator.environments.tool_calls import Parser, ReadsCalls, find_parser
from holdfast.shared.errors import ConfigError, DataError

RESULT = "result"
"""Where `session.state` has what `play` returned."""


@dataclass(frozen=True)
class Endpoint:
    """Where one rollout asks for what the policy says, as OpenAI's clients take it.

    Attributes:
        base_url: ends with `/v1`; it is this rollout's alone, and answers until `play` returns.
        api_key: goes with every request.
        model: what the policy is called there.
    """

    base_url: str
    api_key: str
    rollout: _Rollout = field(repr=False)
    model: str = MODEL

    @property
    def is_full(self) -> bool:
        """Whether a request was refused because no room was left within `seq_len`."""
        return self.rollout.is_full

    def restart(self) -> None:
        """Let a harness that has died play the rollout again: the same requests get the same answers."""
        self.rollout.restart()


class HarnessEnvironment(Environment):
    """Base of environments whose rollouts are played by a program that asks for chat completions.

    Attributes:
        tool_parser: the setting of that name.
        reward_of_full: what a rollout earns whose `play` raises after a request that found no room within `seq_len`.
    """

    tool_parser: str = "auto"
    reward_of_full: float = 0.0

    async def play(self, endpoint: Endpoint, task: Task) -> float | Score:
        """Play one rollout of `task` by asking `endpoint`, one request after the other; return what it earned."""
        raise NotImplementedError(f"{type(self).__name__} needs a method play(endpoint, task)")

    async def run(self, session: Session, task: Task) -> None:
        """Serve the requests of one rollout until `play` returns.

        Raises:
            PromptTooLong: the first request leaves no room for an answer within `seq_len`.
            RuntimeError: it has asked for nothing that could be answered, or an answer is still on its way.
        """
        server = await chat_server()
        rollout = _Rollout(session, tool_parser=self.tool_parser)
        try:
            with server.serving(rollout) as base_url:
                result = await self._play(Endpoint(base_url, server.api_key, rollout), task)
            if rollout.too_long is not None and not session.texts:
                raise rollout.too_long
            if rollout.is_answering:
                raise RuntimeError("play() returned while a request of it was being answered: await every one")
            if not session.texts:
                raise RuntimeError(f"play() returned without a request that was answered.{rollout.last_refusal}")
            session.state[RESULT] = result
        finally:
            await rollout.end()

    async def _play(self, endpoint: Endpoint, task: Task) -> float | Score:
        try:
            return await self.play(endpoint, task)
        except Exception:
            if not endpoint.is_full:
                raise
            return self.reward_of_full  # as what the policy said left no room: no failure of the environment

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return what `play` has returned for each session."""
        results = [session.state[RESULT] for session in sessions]
        return [result if isinstance(result, Score) else Score(result) for result in results]


class _Rollout:
    """One rollout: requests go in, the session grows."""

    def __init__(self, session: Session, *, tool_parser: str) -> None:
        self._session = session
        self._tool_parser = tool_parser
        # Of the call that plays it: its clock stands while the policy is sampled.
        self._context = contextvars.copy_context()
        self._counts = session.request_counts = Counter()
        self._said: list[dict[str, Any]] = []
        self._tools: list[Any] | None = None
        self._parse: Parser | None = None
        self._body = b""
        self._answered: list[tuple[ChatRequest, dict[str, Any]]] = []
        self._num_replayed: int | None = None
        self._turn: asyncio.Task[dict[str, Any]] | None = None
        self.too_long: PromptTooLong | None = None
        self.last_refusal = ""

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self._turn is not None and not self._turn.done()

    @property
    def is_full(self) -> bool:
        """Whether a request was refused for want of room."""
        return self._counts["refused/full"] > 0

    def restart(self) -> None:
        """Expect the requests from the first one on."""
        self._num_replayed = 0
        self._body = b""

    async def end(self) -> None:
        """Answer nothing more."""
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.gather(self._turn, return_exceptions=True)  # who asked is gone, or was told

    async def answer(self, body: bytes, *, is_retry: bool) -> dict[str, Any]:
        """Return the answer to a request; the same to one that a client sends again, as it got none.

        Raises:
            Refused, HoldfastError: there is none.
        """
        try:
            if self._turn is not None and is_retry and body == self._body:
                return await asyncio.shield(self._turn)
            request = read_request(body, model=MODEL)
            if self._turn is not None and self._num_replayed == len(self._answered):
                await asyncio.wait([self._turn])  # what the one that died has asked last
            if (known := self._replayed(request)) is not None:
                return known
            if self.is_answering:
                told = "await one after the other, and play several conversations as several rollouts"
                raise Refused("parallel", f"another request of this rollout is being answered: {told}")
            self._body = body
            self._turn = self._context.copy().run(asyncio.create_task, self._answer(request))
            answer = await asyncio.shield(self._turn)
        except Refused as refusal:
            self._counts[f"refused/{refusal.reason}"] += 1
            self.last_refusal = f" The last refusal: {refusal}"
            raise
        self._counts["answered"] += 1
        return answer

    async def _answer(self, request: ChatRequest) -> dict[str, Any]:
        session = self._session
        try:
            self._extend(request)
            await session.sample(max_tokens=request.max_tokens)
        except SessionFull as error:
            session.truncated = True
            if not session.token_ids:
                self.too_long = PromptTooLong(f"the prompt of the harness: {error}")
            raise Refused("full", str(error), code="context_length_exceeded") from None
        except (ConfigError, DataError, TypeError) as error:
            raise Refused("malformed", str(error)) from None
        reply = reply_of(session, tools=self._tools, parse=self._parse)
        self._said = [*request.messages, reply | {"content": reply["content"] or ""}]
        answer = completion_of(reply, session, model=MODEL)
        self._answered.append((request, answer))
        return answer

    def _replayed(self, request: ChatRequest) -> dict[str, Any] | None:
        """Return what a request of a harness that began again was answered before; None for a new one."""
        place, self._num_replayed = self._num_replayed, None
        if place is None or place >= len(self._answered):
            return None
        if self._answered[place][0] != request:
            raise Refused("history", f"request {place + 1} is another than before the harness was started again")
        self._num_replayed = place + 1
        return self._answered[place][1]

    def _extend(self, request: ChatRequest) -> None:
        """Append to the session what the request says beyond what was said.

        Raises:
            Refused: it does not go on where the last one ended.
        """
        session, said = self._session, self._said
        if not said:
            if request.tools:
                self._parse = self._parser(request.tools)
            session.begin(request.messages, tools=request.tools)
            self._tools = request.tools
            return
        if request.tools != self._tools:
            raise Refused(
                "history", "the tools are others than at the first request, behind which this rollout goes on"
            )
        pairs = zip(said, request.messages, strict=False)
        other = next((number for number, pair in enumerate(pairs) if not is_same(*pair)), None)
        if other is not None or len(request.messages) <= len(said):
            place = min(len(said), len(request.messages)) if other is None else other
            told = f"it must repeat the {len(said)} messages so far, with what was answered, and go on behind them"
            raise Refused("history", f"a rollout is one conversation: {told}; from messages[{place}] on it does not")
        session.append_messages(request.messages[len(said) :])

    def _parser(self, tools: list[Any]) -> Parser:
        tokenizer = self._session.tokenizer
        if isinstance(tokenizer, ReadsCalls):
            return tokenizer.calls_in
        source = tokenizer.template(tools).source
        return find_parser(self._tool_parser, template=source, model=tokenizer.name)


def request_metrics(session: Session) -> dict[str, float]:
    """Return the numbers of a session about the requests of its harness; none without one."""
    if session.request_counts is None:
        return {}
    names = ["answered", *(f"refused/{reason}" for reason in REFUSALS)]
    return {f"requests/{name}": float(session.request_counts[name]) for name in names}
