"""A worker of an environment: a process that plays whole groups.

    python -m holdfast.orchestrator.worker <pid of the orchestrator> <socket> <shared memory>

It has the environment and the tokenizer, and asks the orchestrator for what the policy samples. What a group depends on
comes with it, so which worker plays it changes nothing; and whoever plays a group again gets what was sampled for it
already. The worker dies with the orchestrator.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError, DataError, HoldfastError, ProcessKilled
from holdfast.orchestrator.client.client import Affinity
from holdfast.orchestrator.env.guard import CallTimeout, PromptTooLong, sampling, watching_calls
from holdfast.orchestrator.env.judge import JUDGES, JudgeFailure, JudgeRequest
from holdfast.orchestrator.env.registry import load_levels
from holdfast.orchestrator.env.tool_loop import tool_use_of
from holdfast.orchestrator.episodes import Problem, run_group
from holdfast.orchestrator.tasks import FreezeTolerantLoop
from holdfast.orchestrator.worker_protocol import (
    Ask,
    AskJudge,
    Asks,
    Cancel,
    Failed,
    FailureKind,
    FromWorker,
    Judged,
    Play,
    Played,
    Ready,
    Sampled,
    SharedPosition,
    StartWorker,
    frame,
    read_to_worker,
)
from holdfast.process.child import die_with_parent, run_reporting_errors, set_up_logging
from holdfast.protocol.inference import ChatReply, Completion
from holdfast.protocol.rollouts import Dropped, Sampling, TokenIds

_BEAT_S = 0.5
_GROUP: ContextVar[int] = ContextVar("group", default=0)


class Worker:
    """Plays the groups that it is told to, any number at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: SharedPosition) -> None:
        self._reader = reader
        self._writer = writer
        self._place = place
        self._numbers = itertools.count(1)
        self._asked: list[Ask] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._judging: dict[int, asyncio.Future[ChatReply]] = {}
        self._groups: dict[int, asyncio.Task[None]] = {}

    async def work(self) -> None:
        """Work until the orchestrator is gone."""
        start = await read_to_worker(self._reader)
        assert isinstance(start, StartWorker), start
        config = OrchestratorConfig.model_validate_json(start.config)
        position = next(n for n, section in enumerate(config.environments) if section.label == start.environment)
        settings = config.environments[position]
        try:
            tokenizer = load_tokenizer(config.model.tokenizer_name)
            environments = load_levels(settings, key=f"environments[{position}]")
            for environment in environments:
                tool_use_of(environment, settings, tokenizer)
        except HoldfastError as error:
            self._send(Failed(0, _kind_of(error), str(error)))
            await self._writer.drain()
            return
        if settings.worker_memory_gb is not None:
            # Of what is written to and nobody else's, so neither the libraries nor their stacks count.
            most = int(settings.worker_memory_gb * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        JUDGES.set(_AskingJudges(self))
        asyncio.get_running_loop().set_task_factory(self._new_task)
        beating = asyncio.create_task(self._beat())
        self._send(Ready(environments[0].num_tasks))
        with watching_calls():
            while True:
                match await read_to_worker(self._reader):
                    case Play() as play:
                        seed = play.seed
                        problem = Problem(environments[seed.level or 0], settings, seed, number=play.task_id)
                        self._play(play, problem, config, tokenizer)
                    case Cancel(group=group):
                        if group in self._groups:
                            self._groups[group].cancel()
                    case Sampled(request=request, completion=completion):
                        waiting = self._waiting.pop(request, None)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(completion)
                    case Judged() as judged:
                        self._take_judged(judged)
                    case StartWorker():
                        raise AssertionError("started twice")
                if beating.done():
                    beating.result()

    async def _beat(self) -> None:
        while True:
            self._place.beat()
            await asyncio.sleep(_BEAT_S)

    def _play(self, play: Play, problem: Problem, config: OrchestratorConfig, tokenizer: Tokenizer) -> None:
        async def play_it() -> None:
            try:
                outcome = await run_group(problem, play.step, config=config, tokenizer=tokenizer, sampler=sampler)
                found = outcome if isinstance(outcome, list) else []
                self._send(Played(play.group, found, outcome if isinstance(outcome, Dropped) else None))
            except HoldfastError as error:
                self._send(Failed(play.group, _kind_of(error), str(error)))
            finally:
                del self._groups[play.group]

        sampler = _Asking(self, play.group)
        token = _GROUP.set(play.group)
        try:
            self._groups[play.group] = asyncio.create_task(play_it())
        finally:
            _GROUP.reset(token)

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task whose steps are marked as those of the group that it is started by."""
        group = _GROUP.get()
        return asyncio.Task(_Marked(coroutine, group, self._place) if group else coroutine, loop=loop, **options)

    async def ask(self, group: int, token_ids: list[int], *, max_tokens: int, seed: int) -> Completion:
        """Return what the policy samples behind `token_ids`."""
        request = next(self._numbers)
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._send_asked)
        self._asked.append(Ask(group, request, TokenIds(token_ids), max_tokens, seed))
        waiting = self._waiting[request] = asyncio.get_running_loop().create_future()
        try:
            return await waiting
        finally:
            self._waiting.pop(request, None)

    async def ask_judge(self, request: JudgeRequest) -> ChatReply:
        """Return what a judge replies, from the orchestrator.

        Raises:
            JudgeFailure: there is no reply.
        """
        number = next(self._numbers)
        waiting = self._judging[number] = asyncio.get_running_loop().create_future()
        self._send(AskJudge(_GROUP.get(), number, request))
        try:
            return await waiting
        finally:
            self._judging.pop(number, None)

    def _take_judged(self, judged: Judged) -> None:
        waiting = self._judging.pop(judged.number, None)
        if waiting is None or waiting.done():
            return
        if judged.reply is not None:
            waiting.set_result(judged.reply)
        else:
            waiting.set_exception(JudgeFailure(judged.failure, reason=judged.reason))

    def _send_asked(self) -> None:
        asked, self._asked = self._asked, []
        self._send(Asks(asked))

    def _send(self, message: FromWorker) -> None:
        self._writer.write(frame(message))


class _Asking:
    """Samples for the sessions of one group by asking the orchestrator."""

    def __init__(self, worker: Worker, group: int) -> None:
        self._worker = worker
        self._group = group

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return one continuation of `token_ids`; distribution and affinity of the group the orchestrator knows."""
        return await self._worker.ask(self._group, token_ids, max_tokens=max_tokens, seed=seed)

    def check(self) -> None:
        """Raise nothing: when an engine fails, the orchestrator ends the groups."""


class _AskingJudges:
    """The desk of a worker: the orchestrator asks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return the reply; the clock of the environment's call stands meanwhile."""
        with sampling():
            return await self._worker.ask_judge(request)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine that says of every step of its that it is one of its group."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], group: int, place: SharedPosition) -> None:
        self._coroutine = coroutine
        self._group = group
        self._place = place

    def send(self, value: Any, /) -> Any:
        with self._place.within(self._group):
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._place.within(self._group):
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("a task drives it")

    @property
    def cr_frame(self) -> FrameType | None:
        """What tells where a task is reads these of a coroutine."""
        return getattr(self._coroutine, "cr_frame", None)

    @property
    def cr_await(self) -> Any:
        """As above."""
        return getattr(self._coroutine, "cr_await", None)


def _kind_of(error: HoldfastError) -> FailureKind:
    if isinstance(error.__cause__, MemoryError):
        return "memory"
    kinds: dict[type[HoldfastError], FailureKind] = {
        PromptTooLong: "prompt_too_long",
        CallTimeout: "timeout",
        ConfigError: "config",
        DataError: "data",
        ProcessKilled: "killed",
    }
    return kinds.get(type(error), "environment")


async def _serve(connection: socket.socket, place: SharedPosition) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        await Worker(reader, writer, place).work()
    except (EOFError, ConnectionError):
        return  # the orchestrator has no more work


def _end_group_with_this_process() -> None:
    """Have all that the environment starts killed when this process has died, of whatever: also with the orchestrator,
    which kills it otherwise. A process beside it waits for that, outside of its group and with none of its files."""
    worker = os.getpid()
    if os.fork():
        return
    os.setsid()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    die_with_parent(signal.SIGTERM, parent=worker)
    while os.getppid() == worker:
        signal.sigwait([signal.SIGTERM])
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    os._exit(0)


def _main(arguments: list[str]) -> None:
    parent, connection, memory = map(int, arguments)
    die_with_parent(parent=parent)
    _end_group_with_this_process()
    set_up_logging("worker")
    place = SharedPosition(memory)

    def serve() -> None:
        with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
            runner.run(_serve(socket.socket(fileno=connection), place))

    run_reporting_errors(serve)


if __name__ == "__main__":
    _main(sys.argv[1:])
