"""The way to one judge: how many requests at once, how fast they begin, and for how long they are made again."""

from __future__ import annotations

import asyncio
import math

from holdfast.orchestrator.endpoints.chat import ChatClient, ChatRefused, NoChatCompletion
from holdfast.orchestrator.engines.http import Unavailable
from holdfast.orchestrator.engines.retry import EngineLost, RetryPolicy, asked_pause_s
from holdfast.orchestrator.environments.judge import JudgeFailure, JudgeRequest
from holdfast.shared.errors import HoldfastError
from holdfast.shared.process.clock import awake_s
from holdfast.shared.process.events import report
from holdfast.shared.wire.chat_reply import ChatReply
from holdfast.shared.wire.keys import read_key

_TELL_AGAIN_S = 30.0


class JudgeDenied(HoldfastError):
    """A judge lets nobody in: its key is wrong, or there is no such model. Nothing can be scored, so the run ends."""


class JudgeQueue:
    """Asks one judge; the limits are those of the request that it is made for, and of all that share it."""

    def __init__(self, client: ChatClient, request: JudgeRequest) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(request.max_concurrency)
        self._between_s = 60.0 / request.requests_per_minute if request.requests_per_minute else 0.0
        self._next_at = 0.0
        self._answered_at = 0.0
        self._given_up: tuple[float, JudgeFailure] | None = None
        self._tell_at = 0.0

    @staticmethod
    def name_of(request: JudgeRequest) -> tuple[object, ...]:
        """Return what requests of one queue have alike: the server, and its limits."""
        return (request.url, request.api_key_env, request.requests_per_minute, request.max_concurrency)

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return the reply to `request`, asked again while the judge is busy or away.

        Raises:
            JudgeFailure: it is so for too long, refuses, or gives no chat completion.
            JudgeDenied: the key is wrong, or there is no such model.
        """
        queued_at = awake_s()
        async with self._slots:
            attempts, failing_since = RetryPolicy(request.retry_for_s, key="retry_for_s"), math.inf
            while True:
                await self._take_turn()
                # Others have tried for as long as this one may, while it waited for its turn.
                if self._given_up is not None and self._given_up[0] > queued_at:
                    raise self._given_up[1]
                began_at = awake_s()
                try:
                    reply = await self._ask_once(request)
                except Unavailable as failure:
                    failing_since = min(failing_since, began_at)
                    await self._wait(failure, attempts, request, since=failing_since)
                    continue
                except (JudgeFailure, JudgeDenied):
                    self._answered_at = awake_s()
                    raise
                self._answered_at = awake_s()
                return reply

    async def _take_turn(self) -> None:
        now = awake_s()
        at = max(now, self._next_at)
        self._next_at = at + self._between_s
        if at > now:
            await asyncio.sleep(at - now)

    async def _wait(self, failure: Unavailable, attempts: RetryPolicy, request: JudgeRequest, *, since: float) -> None:
        if awake_s() >= self._tell_at:
            self._tell_at = awake_s() + _TELL_AGAIN_S
            report("waiting for a judge", reason=failure, at_most_s=request.retry_for_s)
        try:
            attempts.count(failure, url=request.url)
        except EngineLost as lost:
            gone = JudgeFailure(f"judge at {lost}", reason="judge_away")
            if self._answered_at < since:  # it is not this request alone
                self._given_up = (awake_s(), gone)
            raise gone from None
        # A server that asks for a pause asks everybody.
        self._next_at = max(self._next_at, awake_s() + asked_pause_s(failure))
        await attempts.pause(failure)

    async def _ask_once(self, request: JudgeRequest) -> ChatReply:
        """Return the reply.

        Raises:
            Unavailable: the judge is busy, fails or cannot be reached.
            JudgeFailure, JudgeDenied: as `ask`.
        """
        key = read_key(request.api_key_env) if request.api_key_env else None
        try:
            return await self._client.ask(request.url, request.body, key=key, timeout_s=request.timeout_s)
        except NoChatCompletion as error:
            raise JudgeFailure(f"judge: {error}", reason="judge_unreadable") from None
        except ChatRefused as refusal:
            if refusal.status in (401, 403):
                hint = f"Is the key in {request.api_key_env} right?" if key else "Name its key with api_key_env."
                raise JudgeDenied(f"judge: {refusal}. {hint}") from None
            if refusal.status == 404:
                hint = "Check `model`, and that `url` is what comes before /chat/completions"
                raise JudgeDenied(f"judge: {refusal}. {hint}") from None
            raise JudgeFailure(f"judge: {refusal}", reason="judge_refused") from None
