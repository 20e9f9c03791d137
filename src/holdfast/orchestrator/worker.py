"""A worker of an environment: a process that plays whole groups, and its messages with the orchestrator.

    python -m holdfast.orchestrator.worker <pid of the orchestrator> <socket>

The worker has the environment and the tokenizer. It asks the orchestrator for samples of the policy and replies of
judges, so any worker may play any group. It dies with the orchestrator. Messages are msgpack after their length, over a
pair of sockets.
"""

import asyncio
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError, DataError, HoldfastError, ProcessKilled
from holdfast.orchestrator.env.guard import PromptTooLong, pausing_clock, watching_calls
from holdfast.orchestrator.env.judge import JUDGES, JudgeFailure, JudgeFailureReason, JudgeRequest
from holdfast.orchestrator.env.registry import load_levels
from holdfast.orchestrator.env.tool_loop import tool_use_of
from holdfast.orchestrator.episodes import Problem, TurnRequest, run_group
from holdfast.orchestrator.state import TaskSeed
from holdfast.orchestrator.tasks import FreezeTolerantLoop
from holdfast.process.child import die_with_parent, run_reporting_errors, set_up_logging
from holdfast.protocol.inference import ChatReply, Completion
from holdfast.protocol.rollouts import Dropped, Rollout, TokenIds, decode_packed, encode_packed

FailureKind = Literal["config", "data", "environment", "memory", "killed"]


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker: `OrchestratorConfig` as JSON, and the name of its environment."""

    config: str
    environment: str


class Play(msgspec.Struct, frozen=True, tag=True):
    """Play group `group`, of task `task_id`, which `seed` makes, for batch `step`; `is_alone`: as the only group."""

    group: int
    task_id: int
    seed: TaskSeed
    step: int
    is_alone: bool


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop playing group `group`."""

    group: int


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The answer to request `request`."""

    request: int
    completion: Completion


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The result of request `request` to a judge: its reply, or the reason of its failure."""

    request: int
    reply: ChatReply | None = None
    failure: str = ""
    reason: JudgeFailureReason = "judge_away"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The environment is loaded, and has `num_tasks` tasks; None: no end."""

    num_tasks: int | None = None


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The worker's event loop is alive."""


class Ask(msgspec.Struct, frozen=True):
    """One turn to sample."""

    group: int
    sample_index: int
    request: int
    token_ids: TokenIds
    max_tokens: int
    seed: int


class Asks(msgspec.Struct, frozen=True, tag=True):
    """The turns to sample of one turn of the event loop: equal prompts share a request."""

    asks: list[Ask]


class Left(msgspec.Struct, frozen=True, tag=True):
    """Session `sample_index` of group `group` has been played to its end."""

    group: int
    sample_index: int


class AskJudge(msgspec.Struct, frozen=True, tag=True):
    """Request `request` of group `group` to a judge."""

    group: int
    request: int
    body: JudgeRequest


class Played(msgspec.Struct, frozen=True, tag=True):
    """The result of a group: its rollouts, or why there are none."""

    group: int
    rollouts: list[Rollout]
    dropped: Dropped | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Group `group` failed, and the run ends or plays it again; group 0: the environment could not be loaded."""

    group: int
    kind: FailureKind
    message: str


ToWorker = StartWorker | Play | Cancel | Sampled | Judged
FromWorker = Ready | Alive | Asks | Left | AskJudge | Played | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_packed)
_decode_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_packed).decode
_decode_from_worker = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_packed).decode
_LENGTH = struct.Struct("<Q")


def frame(message: ToWorker | FromWorker) -> bytes:
    """Return the bytes of a message with its length before it."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


async def read_to_worker(reader: asyncio.StreamReader) -> ToWorker:
    """Return the orchestrator's next message. Raises EOFError or ConnectionError if it is gone."""
    return _decode_to_worker(await _read(reader))


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker:
    """Return a worker's next message. Raises EOFError or ConnectionError if it is gone."""
    return _decode_from_worker(await _read(reader))


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


_BEAT_S = 0.5
_GROUP: ContextVar[int] = ContextVar("group")


class Worker:
    """Plays groups, any number at a time; also the `Judges` of its process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._asked: list[Ask] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
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
            # Private memory that is written to: neither the libraries nor their stacks count.
            most = int(settings.worker_memory_gb * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        JUDGES.set(self)
        self._send(Ready(environments[0].num_tasks))
        beating = asyncio.create_task(self._beat())
        with watching_calls():
            while True:
                match await read_to_worker(self._reader):
                    case Play() as play:
                        seed = play.seed
                        environment = environments[seed.level or 0]
                        problem = Problem(environment, settings, seed, play.task_id, is_shared=not play.is_alone)
                        playing = asyncio.create_task(self._play(play, problem, config, tokenizer))
                        playing.add_done_callback(_require_told)
                        self._groups[play.group] = playing
                    case Cancel(group=group):
                        if group in self._groups:
                            self._groups[group].cancel()
                    case (Sampled() | Judged()) as answer:
                        waiting = self._waiting.get(answer.request)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(answer)
                    case StartWorker():
                        raise AssertionError("started twice")
                if beating.done():
                    beating.result()

    async def _beat(self) -> None:
        while True:
            self._send(Alive())
            await asyncio.sleep(_BEAT_S)

    async def _play(self, play: Play, problem: Problem, config: OrchestratorConfig, tokenizer: Tokenizer) -> None:
        _GROUP.set(play.group)
        sampler = _Asking(self, play.group)
        try:
            outcome = await run_group(problem, play.step, config=config, tokenizer=tokenizer, sampler=sampler)
            is_dropped = isinstance(outcome, Dropped)
            self._send(Played(play.group, [] if is_dropped else outcome, outcome if is_dropped else None))
        except HoldfastError as error:
            self._send(Failed(play.group, _kind_of(error), str(error)))
        finally:
            del self._groups[play.group]

    async def sample(self, group: int, turn: TurnRequest) -> Completion:
        """Return what the policy samples for `turn`."""
        request = next(self._numbers)
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._send_asked)
        self._asked.append(Ask(group, turn.sample_index, request, TokenIds(turn.token_ids), turn.max_tokens, turn.seed))
        return (await self._answer_to(request)).completion

    def leave(self, group: int, sample_index: int) -> None:
        """Tell that a session has been played to its end."""
        self._send(Left(group, sample_index))

    async def ask(self, request: JudgeRequest) -> ChatReply:
        """Return a judge's reply, while the clock of the call stands still. Raises JudgeFailure without a reply."""
        number = next(self._numbers)
        self._send(AskJudge(_GROUP.get(), number, request))
        with pausing_clock():
            judged = await self._answer_to(number)
        if judged.reply is None:
            raise JudgeFailure(judged.failure, reason=judged.reason)
        return judged.reply

    async def _answer_to(self, request: int) -> Any:
        """Return the orchestrator's message that answers a request."""
        waiting = self._waiting[request] = asyncio.get_running_loop().create_future()
        try:
            return await waiting
        finally:
            del self._waiting[request]

    def _send_asked(self) -> None:
        asked, self._asked = self._asked, []
        with _ending_at_errors():
            self._send(Asks(asked))

    def _send(self, message: FromWorker) -> None:
        self._writer.write(frame(message))


@dataclass(eq=False)
class _Asking:
    """Samples for the sessions of one group, whose distribution and affinity the orchestrator knows."""

    worker: Worker
    group: int

    async def sample(self, turn: TurnRequest) -> Completion:
        return await self.worker.sample(self.group, turn)

    def leave(self, sample_index: int) -> None:
        self.worker.leave(self.group, sample_index)

    def check(self) -> None:
        """Raise nothing: if an engine fails, the orchestrator ends the groups."""


def _kind_of(error: HoldfastError) -> FailureKind:
    if isinstance(error.__cause__, MemoryError):
        return "memory"
    kinds: dict[type[HoldfastError], FailureKind] = {
        ConfigError: "config",
        DataError: "data",
        PromptTooLong: "data",
        ProcessKilled: "killed",
    }
    return kinds.get(type(error), "environment")


@contextmanager
def _ending_at_errors() -> Iterator[None]:
    """End the process at an error, such as a lack of memory: else the orchestrator would wait for ever."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - whatever it is
        try:
            traceback.print_exception(error)
            sys.stderr.flush()
        finally:
            os._exit(1)


def _require_told(playing: asyncio.Task[None]) -> None:
    """End the process if the result of a group could not be told."""
    if not playing.cancelled():
        with _ending_at_errors():
            playing.result()


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    with suppress(EOFError, ConnectionError):  # the orchestrator has ended
        await Worker(reader, writer).work()


def _end_group_with_this_process() -> None:
    """Fork a process that kills everything that the environment has started when this process has died.

    The orchestrator does the same, but may be dead too. The new process is outside of the group, without its files."""
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
    parent, connection = map(int, arguments)
    die_with_parent(parent=parent)
    _end_group_with_this_process()
    set_up_logging("worker")

    def serve() -> None:
        with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
            runner.run(_serve(socket.socket(fileno=connection)))

    run_reporting_errors(serve)


if __name__ == "__main__":
    _main(sys.argv[1:])
