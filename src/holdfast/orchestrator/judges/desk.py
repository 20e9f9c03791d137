"""The desk at which a process asks judges: a reply that is there is returned, else the judge is asked, once.

One desk serves the environments of its process and of all their workers, so what two of them ask at the same time is
asked once, and a limit of requests per minute holds for the run. See
docs/decisions/0035-judges-are-asked-in-one-place.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast.orchestrator.endpoints.chat import ChatClient
from holdfast.orchestrator.endpoints.reply_log import ReplyLog
from holdfast.orchestrator.environments.calls import sampling
from holdfast.orchestrator.environments.judge import JUDGES, JudgeRequest
from holdfast.orchestrator.judges.queue import JudgeDenied, JudgeQueue
from holdfast.orchestrator.task_group import FirstFailure
from holdfast.shared.errors import RunDirError
from holdfast.shared.process.heartbeat import moved
from holdfast.shared.wire.chat_reply import ChatReply

_T = TypeVar("_T")


class Desk:
    """Asks judges and keeps what they say.

    Args:
        path: of the log; None: replies are kept in memory, for as long as the desk is there.

    Raises:
        RunDirError: the log cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self._log = ReplyLog(path)
        self._asking: dict[str, asyncio.Task[ChatReply]] = {}
        self._queues: dict[tuple[object, ...], JudgeQueue] = {}
        self._client: ChatClient | None = None
        self._failure = FirstFailure()

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return the reply to `request`; the clock of the environment's call stands meanwhile.

        Raises:
            JudgeFailure: there is none.
            JudgeDenied, RunDirError: nothing can be asked, or kept.
        """
        self._failure.check()
        key = request.key
        if (found := self._log.find(key)) is not None:
            return found
        if key not in self._asking:
            asking = self._asking[key] = asyncio.create_task(self._ask(request, key))
            asking.add_done_callback(lambda done: self._end(key, done))
        with sampling():
            # Shielded: whoever asked may be gone, such as a worker that is killed, and the reply is kept all the same.
            return await asyncio.shield(self._asking[key])

    async def guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`, whose environments ask here; cancelled as soon as nothing can be asked or kept.

        Raises:
            JudgeDenied, RunDirError: why; or whatever `work` raises.
        """
        return await self._failure.guard(work)

    async def close(self) -> None:
        """Ask no more."""
        for asking in (waiting := list(self._asking.values())):
            asking.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self._log.close()

    async def _ask(self, request: JudgeRequest, key: str) -> ChatReply:
        try:
            reply = await self._queue(request).ask(request)
            moved()
            # Kept before anybody sees it: what was scored is scored alike after a kill.
            self._log.append(key, reply)
        except (JudgeDenied, RunDirError) as error:
            self._failure.set(error)
            raise
        return reply

    def _queue(self, request: JudgeRequest) -> JudgeQueue:
        if self._client is None:
            self._client = ChatClient()
        name = JudgeQueue.name_of(request)
        if name not in self._queues:
            self._queues[name] = JudgeQueue(self._client, request)
        return self._queues[name]

    def _end(self, key: str, done: asyncio.Task[ChatReply]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # known to all who wait, if anybody does


@asynccontextmanager
async def judging(path: Path | None = None) -> AsyncIterator[Desk]:
    """Have the environments of this context ask judges here.

    Args:
        path: where replies are kept; None: in memory.

    Raises:
        RunDirError: the log cannot be read or written.
    """
    desk = Desk(path)
    token = JUDGES.set(desk)
    try:
        yield desk
    finally:
        JUDGES.reset(token)
        await desk.close()


async def guarded(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`; where judges are asked, it ends as soon as nothing can be asked or kept.

    Raises:
        JudgeDenied, RunDirError: why; or whatever `work` raises.
    """
    desk = JUDGES.get(None)
    return await (desk.guard(work) if isinstance(desk, Desk) else work)
