"""What the orchestrator and the workers of an environment say to one another, and the memory that they share.

Messages are msgpack behind their length, over a pair of sockets. Tasks never travel: a worker plays whole groups, and
asks for what the policy samples.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.orchestrator.env.judge import JudgeFailureReason, JudgeRequest
from holdfast.orchestrator.state import TaskSeed
from holdfast.protocol.inference import ChatReply, Completion
from holdfast.protocol.rollouts import Dropped, Rollout, TokenIds, decode_packed, encode_packed

FailureKind = Literal["config", "data", "environment", "prompt_too_long", "timeout", "memory", "killed"]


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker: `OrchestratorConfig` as JSON, and which of its environments is played."""

    config: str
    environment: str


class Play(msgspec.Struct, frozen=True, tag=True):
    """Play group `group`, of task `task_id`, which `seed` makes, for batch `step`."""

    group: int
    task_id: int
    seed: TaskSeed
    step: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for group `group` any more."""

    group: int


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The answer to request `request`."""

    request: int
    completion: Completion


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The environment is loaded, and has `num_tasks` tasks; None: any number."""

    num_tasks: int | None = None


class Ask(msgspec.Struct, frozen=True):
    """One turn to be sampled."""

    group: int
    request: int
    token_ids: TokenIds
    max_tokens: int
    seed: int


class Asks(msgspec.Struct, frozen=True, tag=True):
    """Turns that were asked for in one turn of the event loop: those with the same prompt can share a request."""

    asks: list[Ask]


class Played(msgspec.Struct, frozen=True, tag=True):
    """What came of a group: its rollouts, or why there are none."""

    group: int
    rollouts: list[Rollout]
    dropped: Dropped | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Group `group` failed in a way that ends the run, or with 0 the loading of the environment."""

    group: int
    kind: FailureKind
    message: str


class AskJudge(msgspec.Struct, frozen=True, tag=True):
    """Request `number` of group `group` to a judge."""

    group: int
    number: int
    request: JudgeRequest


class Judged(msgspec.Struct, frozen=True, tag=True):
    """What came of request `number` to a judge: its reply, or why there is none."""

    number: int
    reply: ChatReply | None = None
    failure: str = ""
    reason: JudgeFailureReason = "judge_away"


ToWorker = StartWorker | Play | Cancel | Sampled | Judged
FromWorker = Ready | Asks | AskJudge | Played | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_packed)
_decode_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=decode_packed).decode
_decode_from_worker = msgspec.msgpack.Decoder(FromWorker, dec_hook=decode_packed).decode
_LENGTH = struct.Struct("<Q")


def frame(message: ToWorker | FromWorker) -> bytes:
    """Return the bytes of a message with its length before it."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


async def read_to_worker(reader: asyncio.StreamReader) -> ToWorker:
    """Return the next message of the orchestrator.

    Raises:
        EOFError, ConnectionError: it is gone.
    """
    return _decode_to_worker(await _read(reader))


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker:
    """Return the next message of a worker.

    Raises:
        EOFError, ConnectionError: it is gone.
    """
    return _decode_from_worker(await _read(reader))


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


@dataclass(frozen=True)
class WorkerPosition:
    """Where a worker is: numbers that change with everything it does, and the group whose code runs; 0: none."""

    beats: int
    steps: int
    group: int


class SharedPosition:
    """The memory in which a worker leaves where it is, so that its end can be blamed on a group, whatever ended it."""

    _layout = struct.Struct("<qqq")

    def __init__(self, descriptor: int) -> None:
        """Map the memory of `descriptor`, which is of `SIZE` bytes."""
        self._memory = mmap.mmap(descriptor, self.SIZE)
        self._beats = self._steps = 0

    SIZE = 4096

    def read(self) -> WorkerPosition:
        """Return where the worker is."""
        return WorkerPosition(*self._layout.unpack_from(self._memory))

    def beat(self) -> None:
        """Say that the event loop turns."""
        self._beats += 1
        self._write(0)

    @contextmanager
    def within(self, group: int) -> Iterator[None]:
        """Say that code of `group` runs meanwhile."""
        self._steps += 1
        self._write(group)
        try:
            yield
        finally:
            self._write(0)

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()

    def _write(self, group: int) -> None:
        self._layout.pack_into(self._memory, 0, self._beats, self._steps, group)
