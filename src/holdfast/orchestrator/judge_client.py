"""Asks judges for the environments of a process and of all its workers, and keeps every reply.

A `JudgeClient` returns a kept reply, or asks the judge: equal requests at the same time are one request. A `JudgeQueue`
has the limits of one judge. A `ReplyLog` keeps replies by request in `judgements.log`, one msgpack map per record (see
`holdfast.run.record_log`), for all later attempts, so nobody pays twice. A killed process loses no reply; after a power
cut the run may ask for the last replies again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.errors import HoldfastError, RunDirError, masked, printable
from holdfast.orchestrator.client.http import Unavailable, retry_after_s
from holdfast.orchestrator.client.pool import EngineLost, RetryPolicy, asked_pause_s
from holdfast.orchestrator.env.guard import pausing_clock
from holdfast.orchestrator.env.judge import JUDGES, JudgeFailure, JudgeRequest
from holdfast.orchestrator.tasks import FirstFailure
from holdfast.process.events import report
from holdfast.process.heartbeat import awake_s, moved
from holdfast.protocol.inference import ChatReply, read_key
from holdfast.run.record_log import RecordLog, read_records, whole_bytes

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger("orchestrator")

_MOST_BYTES = 1 << 24
"""Size of an answer."""


class _Message(msgspec.Struct):
    content: str | None = None


class _ReplyChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_ReplyChoice]


class JudgeDenied(HoldfastError):
    """The key of a judge is wrong, or the judge does not know the model. The run ends."""


def new_client() -> httpx.AsyncClient:
    """Return a client for any number of requests at once."""
    import httpx  # takes 0.1 s, and most runs ask no judge

    # httpx only bounds each piece of an answer.
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


async def ask_once(client: httpx.AsyncClient, request: JudgeRequest) -> ChatReply:
    """Return the reply to a request; `timeout_s` bounds the whole answer, and the key is in no message. Raise
    Unavailable if the judge is busy, fails or cannot be reached; JudgeFailure if the judge refuses, or its answer is
    not a chat completion; JudgeDenied if the key is wrong, or the judge does not know the model."""
    import httpx

    what = f"judge: POST {masked(request.url)}"
    key = read_key(request.api_key_env) if request.api_key_env else None
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    content = bytearray()
    try:
        async with (
            asyncio.timeout(request.timeout_s),
            client.stream("POST", request.url, content=request.body, headers=headers) as answer,
        ):
            async for piece in answer.aiter_bytes():
                content += piece
                if len(content) > _MOST_BYTES:
                    raise _unreadable(f"{what} was answered with more than {_MOST_BYTES} bytes; the rest is not read")
    except TimeoutError:
        raise Unavailable(f"{what} had no answer within {request.timeout_s:g} s (timeout_s)") from None
    except httpx.TransportError as error:
        raise Unavailable(f"{what}: {type(error).__name__} {error}".rstrip()) from None
    except httpx.RequestError as error:
        raise _unreadable(f"{what}: {type(error).__name__} {error}".rstrip()) from None
    if answer.is_success:
        return _decode(bytes(content), what)
    told = content.decode(errors="backslashreplace")
    told = printable(told.replace(key, "...") if key else told)[:500]  # some judges repeat the key
    status, reason = answer.status_code, f"{what} was answered {answer.status_code}: {told}"
    if status in (408, 429) or status >= 500:
        raise Unavailable(reason, retry_after_s=retry_after_s(answer.headers.get("retry-after", "")))
    if status in (401, 403):
        hint = f"Is the key in {request.api_key_env} right?" if key else "Name its key with api_key_env."
        raise JudgeDenied(f"{reason}. {hint}")
    if status == 404:
        raise JudgeDenied(f"{reason}. Check `model`, and that `url` is what comes before /chat/completions")
    raise JudgeFailure(reason, reason="judge_refused")


def _unreadable(message: str) -> JudgeFailure:
    return JudgeFailure(message, reason="judge_unreadable")


def _decode(content: bytes, what: str) -> ChatReply:
    try:
        found = msgspec.json.decode(content, type=_ChatCompletion)
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{what} was answered with what is not a chat completion: {error}") from None
    if len(found.choices) != 1:
        raise _unreadable(f"{what} was answered with {len(found.choices)} choices, asked for was one")
    [choice] = found.choices
    return ChatReply(choice.message.content or "", choice.finish_reason or "stop")


_TELL_AGAIN_S = 30.0


class JudgeQueue:
    """Asks one judge, within the limits of its first request."""

    def __init__(self, client: httpx.AsyncClient, request: JudgeRequest) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(request.max_concurrency)
        self._between_s = 60.0 / request.requests_per_minute if request.requests_per_minute else 0.0
        self._next_at = 0.0
        self._answered_at = 0.0
        self._given_up: tuple[float, JudgeFailure] | None = None
        self._tell_at = 0.0

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return the reply to `request`, sent again while the judge is busy or away.

        Raises JudgeFailure if that lasts too long, or the judge refuses or gives no chat completion; JudgeDenied."""
        queued_at = awake_s()
        async with self._slots:
            attempts, failing_since = RetryPolicy(request.retry_for_s, key="retry_for_s"), math.inf
            while True:
                await self._take_turn()
                # Another request has given up on this judge since this one was queued.
                if self._given_up is not None and self._given_up[0] > queued_at:
                    raise self._given_up[1]
                began_at = awake_s()
                try:
                    reply = await ask_once(self._client, request)
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
            attempts.count(failure, url=masked(request.url))
        except EngineLost as lost:
            gone = JudgeFailure(f"judge at {lost}", reason="judge_away")
            if self._answered_at < since:  # no other request was answered meanwhile
                self._given_up = (awake_s(), gone)
            raise gone from None
        # The pause holds for all requests to this judge.
        self._next_at = max(self._next_at, awake_s() + asked_pause_s(failure))
        await attempts.pause(failure)


class Replied(msgspec.Struct, frozen=True, tag="reply_1"):
    """One record; `request` is the key of the request, the tag the version of the format."""

    request: str
    reply: ChatReply


class ReplyLog:
    """Replies by request, in memory and in a file, which the first reply creates; `path` None: no file.

    Raises RunDirError if the file cannot be read or written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._replies: dict[str, ChatReply] = {}
        self._records: RecordLog | None = None
        try:
            if path is not None and path.exists():
                self._records = RecordLog(path, valid_bytes=self._load(path))
        except OSError as error:
            raise self._unwritable(error) from error

    def find(self, request: str) -> ChatReply | None:
        return self._replies.get(request)

    def append(self, request: str, reply: ChatReply) -> None:
        """Keep a reply. Raises RunDirError if it cannot be written."""
        try:
            if self._records is None and self._path is not None:
                self._records = RecordLog(self._path, valid_bytes=0)
            if self._records is not None:
                self._records.append(msgspec.msgpack.encode(Replied(request, reply)))
        except OSError as error:
            raise self._unwritable(error) from error
        self._replies[request] = reply

    def close(self) -> None:
        """Close the file; a thread makes the rest of it durable."""
        if self._records is not None:
            self._records.close()

    def _load(self, path: Path) -> int:
        """Index the file; return where its records end."""
        payloads, damages = read_records(path)
        for damage in damages:
            _log.warning("%s: %s; these replies are asked for again", path, damage)
        num_unknown = 0
        for payload in payloads:
            try:
                replied = msgspec.msgpack.decode(payload, type=Replied)
            except (msgspec.DecodeError, UnicodeDecodeError):
                num_unknown += 1
                continue
            self._replies[replied.request] = replied.reply
        if num_unknown:
            _log.warning("%s: %d records are not replies of this version, and are asked for again", path, num_unknown)
        return whole_bytes(path, damages) if payloads else 0

    def _unwritable(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"replies cannot be kept in {self._path}: {error.strerror or error}. Mend that and start again: kept "
            "replies are not asked for again."
        )


_T = TypeVar("_T")


class JudgeClient:
    """Asks judges and keeps their replies in the log at `path`; None: in memory. `failure`: why nothing can be asked or
    kept any more."""

    def __init__(self, path: Path | None) -> None:
        self._log = ReplyLog(path)
        self._asking: dict[str, asyncio.Task[ChatReply]] = {}
        self._queues: dict[tuple[object, ...], JudgeQueue] = {}
        self._client: httpx.AsyncClient | None = None
        self.failure = FirstFailure()

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return the reply to `request`, while the clock of the call stands still.

        Raises JudgeFailure without a reply; JudgeDenied or RunDirError if nothing can be asked or kept any more."""
        self.failure.check()
        key = request.key
        if (found := self._log.find(key)) is not None:
            return found
        if key not in self._asking:
            asking = self._asking[key] = asyncio.create_task(self._ask(request, key))
            asking.add_done_callback(lambda done: self._end(key, done))
        with pausing_clock():
            # Shielded: the reply is kept even if who asked, such as a killed worker, is gone.
            return await asyncio.shield(self._asking[key])

    async def close(self) -> None:
        for asking in (waiting := list(self._asking.values())):
            asking.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
        self._log.close()

    async def _ask(self, request: JudgeRequest, key: str) -> ChatReply:
        try:
            reply = await self._queue(request).ask(request)
            moved()
            # First: after a kill the same reply must score again.
            self._log.append(key, reply)
        except (JudgeDenied, RunDirError) as error:
            self.failure.set(error)
            raise
        return reply

    def _queue(self, request: JudgeRequest) -> JudgeQueue:
        if self._client is None:
            self._client = new_client()
        server = (request.url, request.api_key_env, request.requests_per_minute, request.max_concurrency)
        if server not in self._queues:
            self._queues[server] = JudgeQueue(self._client, request)
        return self._queues[server]

    def _end(self, key: str, done: asyncio.Task[ChatReply]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # so that asyncio does not report it as never retrieved


@asynccontextmanager
async def judging(path: Path | None = None) -> AsyncIterator[JudgeClient]:
    """Let the environments of this context ask judges; replies are kept in the log at `path`, or in memory."""
    judges = JudgeClient(path)
    token = JUDGES.set(judges)
    try:
        yield judges
    finally:
        JUDGES.reset(token)
        await judges.close()


async def guarded(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`; cancel it and raise the reason if no judge can be asked or no reply kept."""
    judges = JUDGES.get(None)
    return await (judges.failure.guard(work) if isinstance(judges, JudgeClient) else work)
