"""Plays prompt groups, in this process or in worker processes of an environment.

If a worker dies, another worker plays its groups again, with the same samples and so the same result. A group is at
fault if it ends a worker that plays nothing else, or if the worker named its task before the end.

    (singly: by a worker that plays nothing else)

    how a worker dies                    the group at fault    the others
    code blocks it beyond `timeout_s`    fails: timeout        played again, singly
    it exits, or of a signal             fails: crash          played again, singly
    it is out of memory                  fails: memory         played again
    a signal from outside                played again          played again; from the second time on singly
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import logging
import os
import signal
import socket
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import xxhash

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.environments import EnvironmentConfig, SamplingConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import (
    MOST_KILLED,
    STUCK,
    ConfigError,
    DataError,
    EnvironmentFailure,
    HoldfastError,
    ProcessDied,
    ProcessKilled,
    printable,
)
from holdfast.orchestrator import worker as messages
from holdfast.orchestrator.env.guard import CallTimeout
from holdfast.orchestrator.env.judge import JUDGES, JudgeFailure
from holdfast.orchestrator.episodes import (
    Outcome,
    Problem,
    TurnRequest,
    TurnSampler,
    WorkerCrashed,
    context_of,
    dropped,
    run_group,
)
from holdfast.orchestrator.tasks import race, run_all
from holdfast.process.child import is_stopped, killed_by
from holdfast.process.heartbeat import awake_s
from holdfast.process.imports import module_command
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Dropped
from holdfast.run.manifest import content_digest
from holdfast.run.settings import files_of_environment

_log = logging.getLogger("orchestrator")

_LOOK_S = 1.0
_GRACE_S = 15.0
"""Beyond the deadline: a worker ends itself and names the line, unless a call of C blocks all its threads."""
_END_S = 5.0
_TAIL = 1 << 13
_MOST_OUTPUT_BYTES = 1 << 24
"""Shown of one worker: an environment that prints without end must not fill the disk of the log."""

DeathKind = Literal["crashed", "hung", "killed", "closed"]


class GroupKilled(ProcessKilled):
    """Something outside killed the process that played a group; `is_alone`: a worker must play only this group."""

    def __init__(self, told: str, *, is_alone: bool) -> None:
        super().__init__(told)
        self.is_alone = is_alone


class WorkerDied(Exception):
    """A worker `crashed` (exit or signal), `hung` (code blocked it), was `killed` from outside, or was `closed`."""

    def __init__(self, kind: DeathKind, told: str) -> None:
        super().__init__(told)
        self.kind: DeathKind = kind


@dataclass
class _PlayedGroup:
    problem: Problem
    sampler: TurnSampler
    ended: asyncio.Future[messages.Played | messages.Failed]
    turns: set[asyncio.Task[None]] = field(default_factory=set)


class _Running:
    """A worker process, from its start to its end.

    Attributes:
        is_ready: the number of tasks (None: no end), when the environment is loaded.
        life: ends with the process.
    """

    def __init__(self, settings: EnvironmentConfig, config: OrchestratorConfig) -> None:
        self._name = settings.label
        self._sampling = config.rollouts_of(settings).sampling
        self._bound_s = min(settings.deadline_s or config.hang_timeout_s, config.hang_timeout_s) + _GRACE_S
        self._groups: dict[int, _PlayedGroup] = {}
        self._numbers = itertools.count(1)
        self._kind: DeathKind | None = None
        self._unreadable = ""
        self._heard_at = 0.0
        self.is_over = False
        self.is_ready: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.is_ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        # A worker only needs to know `max_tokens`, and `evaluate` may sample in ways that training refuses.
        plain = config.model_copy(update={"sampling": SamplingConfig(max_tokens=config.sampling.max_tokens)})
        self._beginning = asyncio.create_task(
            self._begin(messages.StartWorker(plain.model_dump_json(), settings.label))
        )
        self.life = asyncio.create_task(self._live())

    @property
    def num_groups(self) -> int:
        """How many groups it plays now."""
        return len(self._groups)

    async def _begin(self, start: messages.StartWorker) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *module_command("holdfast.orchestrator.worker", str(os.getpid()), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that all that it starts can be killed with it
            )
        finally:
            theirs.close()
        self._output = _WorkerOutput(self._process, self._name)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._send(start)

    async def play(
        self, problem: Problem, step: int, sampler: TurnSampler, *, is_alone: bool = False
    ) -> messages.Played | messages.Failed:
        """Return the result of a group. Raises WorkerDied, or what loading raised."""
        number = next(self._numbers)
        group = self._groups[number] = _PlayedGroup(problem, sampler, asyncio.get_running_loop().create_future())
        try:
            await asyncio.shield(self.is_ready)
            if self.is_over:
                raise WorkerDied("killed", "it ended before")
            self._send(messages.Play(number, problem.task_id, problem.seed, step, is_alone))
            return await group.ended
        finally:
            del self._groups[number]
            for turn in group.turns:
                turn.cancel()
            ended = group.ended
            if self.is_ready.done() and (not ended.done() or ended.cancelled() or ended.exception() is not None):
                self._send(messages.Cancel(number))

    async def close(self) -> None:
        """End the process with all that it has started; others play its groups again."""
        await asyncio.wait([self._beginning])
        if not self.is_over:
            self._kind = self._kind or "closed"
            self._writer.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            self._kill()
        await asyncio.shield(self.life)  # who no longer waits must not keep it from ending its groups

    def _send(self, message: messages.ToWorker) -> None:
        if not self.is_over and not self._writer.is_closing():
            self._writer.write(messages.frame(message))

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _live(self) -> None:
        try:
            await self._beginning
        except Exception as error:  # noqa: BLE001 - raised where the worker is awaited
            self.is_over = True
            self.is_ready.set_exception(error)
            return
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                message = await messages.read_from_worker(self._reader)
                self._heard_at = awake_s()
                self._take(message)
        except (EOFError, ConnectionError):
            pass  # the worker has ended, see `_end`
        # Code of the environment has written to the socket; InvalidStateError: a second `Ready`.
        except (msgspec.MsgspecError, UnicodeDecodeError, asyncio.InvalidStateError) as error:
            self._unreadable = str(error)
            self._kill()
        watching.cancel()
        await self._end()

    def _take(self, message: messages.FromWorker) -> None:
        match message:
            case messages.Ready(num_tasks=num_tasks):
                self.is_ready.set_result(num_tasks)
            case messages.Asks(asks=asks):
                for ask in asks:
                    self._begin_for(ask.group, lambda group, ask=ask: self._sample(ask, group))
            case messages.Left() as left:
                if (group := self._groups.get(left.group)) is not None:
                    group.sampler.leave(left.sample_index)
            case messages.AskJudge() as ask:
                self._begin_for(ask.group, lambda _: self._judge(ask))
            case messages.Failed(group=0) as failed:
                self.is_ready.set_exception(error_of(failed))
            case (messages.Played() | messages.Failed()) as ended:
                group = self._groups.get(ended.group)
                if group is not None and not group.ended.done():
                    group.ended.set_result(ended)
            case _:
                pass

    async def _sample(self, ask: messages.Ask, group: _PlayedGroup) -> None:
        affinity = group.problem.affinity
        completion = await group.sampler.sample(
            TurnRequest(ask.token_ids.tolist(), ask.sample_index, self._sampling, ask.max_tokens, ask.seed, affinity)
        )
        self._send(messages.Sampled(ask.request, completion))

    async def _judge(self, ask: messages.AskJudge) -> None:
        try:
            judged = messages.Judged(ask.request, await JUDGES.get().ask(ask.body))
        except JudgeFailure as failure:
            judged = messages.Judged(ask.request, failure=str(failure), reason=failure.reason)
        self._send(judged)

    def _begin_for(self, number: int, work: Callable[[_PlayedGroup], Coroutine[Any, Any, None]]) -> None:
        """Start work that a group waits for; its failure ends the group."""
        group = self._groups.get(number)
        if group is None:
            return

        def take(turn: asyncio.Task[None]) -> None:
            group.turns.discard(turn)
            error = None if turn.cancelled() else turn.exception()
            if error is not None and not group.ended.done():
                group.ended.set_exception(error)

        turn = asyncio.create_task(work(group))
        group.turns.add(turn)
        turn.add_done_callback(take)

    async def _watch(self) -> None:
        """Kill the worker when its event loop has been silent for too long."""
        await asyncio.wait([self.is_ready])  # loading has no bound
        self._heard_at = awake_s()
        while awake_s() - self._heard_at <= self._bound_s:
            await asyncio.sleep(_LOOK_S)
        self._kind = "killed" if is_stopped(self._process.pid) else "hung"
        self._kill()

    async def _end(self) -> None:
        """Wait for the end of the process, and fail its groups."""
        self.is_over = True
        try:
            async with asyncio.timeout(_END_S):
                code = await self._process.wait()
        except TimeoutError:  # it has only closed its socket
            self._kill()
            code = await self._process.wait()
        self._kill()  # what it has started
        await self._output.read_whole()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        kind, told = self._how_it_ended(code)
        if not self.is_ready.done():
            what = f"environment '{self._name}': a worker ended while it loaded it: {told}"
            is_blamed = kind not in ("killed", "closed")
            self.is_ready.set_exception(EnvironmentFailure(what) if is_blamed else WorkerDied(kind, told))
        if self._groups:
            _log.warning("a worker of environment '%s' ended with %d groups: %s", self._name, len(self._groups), told)
        for group in self._groups.values():
            if not group.ended.done():
                group.ended.set_exception(WorkerDied(kind, told))

    def _how_it_ended(self, code: int) -> tuple[DeathKind, str]:
        last = self._output.last_line()
        if self._kind == "closed":
            return "closed", "its worker was ended, since a group of it was out of memory"
        if self._unreadable:
            return "crashed", f"its worker sent what cannot be read ({self._unreadable})"
        if code == STUCK:
            return "hung", last.removeprefix("error: ")
        if self._kind == "hung":
            return "hung", f"its worker made no progress for {self._bound_s:g} s, and was killed"
        by = signal.SIGKILL if self._kind == "killed" else killed_by(code)
        if by is not None:
            why = "; the kernel does so when memory runs out" if by == signal.SIGKILL else ""
            return "killed", f"its worker was killed from outside ({by.name}){why}"
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return "crashed", f"its worker process {how}" + (f"; its last words: {last}" if last else "")


class _WorkerOutput:
    """Shows what a worker prints, up to a limit, and keeps its end."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._name = name
        self._tail = b""
        self._reading = asyncio.create_task(self._read())

    async def read_whole(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._reading

    def last_line(self) -> str:
        lines = self._tail.decode(errors="backslashreplace").split("\n")
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")

    async def _read(self) -> None:
        left, is_told = _MOST_OUTPUT_BYTES, False
        decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode  # a part may end within a character
        while part := await self._stream.read(1 << 16):
            self._tail = (self._tail + part)[-_TAIL:]
            sys.stderr.write(decode(part[:left]))
            if len(part) > left and not is_told:
                is_told = True
                _log.warning(
                    "a worker of environment '%s' prints more than %d bytes: the rest is not shown",
                    self._name,
                    _MOST_OUTPUT_BYTES,
                )
            left = max(0, left - len(part))


def error_of(failed: messages.Failed) -> HoldfastError:
    """Return the error that a worker met."""
    kinds: dict[str, type[HoldfastError]] = {"config": ConfigError, "data": DataError, "killed": ProcessKilled}
    return kinds.get(failed.kind, EnvironmentFailure)(failed.message)


class Workers:
    """The worker processes of an environment, as an async context manager. `num_tasks`: of it; None: no end."""

    def __init__(self, settings: EnvironmentConfig, config: OrchestratorConfig) -> None:
        self._settings = settings
        self._config = config
        self._slots: list[_Running | None] = [None] * settings.workers
        self._living: set[_Running] = set()
        self._alone = asyncio.Semaphore(settings.workers)
        self._digests = self._digests_now()
        self.name = settings.label
        self.num_tasks: int | None = None

    async def __aenter__(self) -> Self:
        """Start all of them. Raises ConfigError, DataError or EnvironmentFailure if one cannot load the environment."""
        try:
            self.num_tasks = (await run_all(map(self._load, range(len(self._slots)))))[0]
        except BaseException:
            await self.rest()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rest()

    async def rest(self) -> None:
        """End the processes; `play` starts them again."""
        await asyncio.gather(*(worker.close() for worker in self._living))

    async def _load(self, slot: int) -> int | None:
        for _ in range(MOST_KILLED):
            with suppress(WorkerDied):
                return await asyncio.shield(self._worker(slot).is_ready)
        raise EnvironmentFailure(
            f"environment '{self.name}': workers were killed {MOST_KILLED} times while they load it"
        )

    def _worker(self, slot: int) -> _Running:
        """Return the worker of a slot, started again if it is gone."""
        worker = self._slots[slot]
        if worker is None or worker.is_over:
            worker = self._slots[slot] = self._new()
        return worker

    def _digests_now(self) -> dict[Path, str]:
        return {path: content_digest(path) for path in files_of_environment(self._settings).values()}

    def _new(self) -> _Running:
        """Start a worker. Raise ProcessDied if it would play or score by other files than the workers before."""
        now = self._digests_now()
        if changed := [path for path, digest in self._digests.items() if now.get(path) != digest]:
            raise ProcessDied(
                f"environment '{self.name}': {changed[0]} has changed since its workers were started, and a new worker "
                "would play or score another way: all of them are started again",
                exit_code=1,  # another try is worth it
            )
        worker = _Running(self._settings, self._config)
        self._living.add(worker)
        worker.life.add_done_callback(lambda _: self._living.discard(worker))
        return worker

    async def play(self, problem: Problem, step: int, sampler: TurnCache, *, is_alone: bool = False) -> Outcome:
        """Return what `run_group` would, from a worker; a group that ends its worker fails as `on_error` says.

        Raises GroupKilled if the worker, or a process of the environment's own, was killed from outside."""
        what = context_of(problem)
        while True:
            sampler.begin_again()
            try:
                ended = await (self._play_alone if is_alone else self._play)(problem, step, sampler)
            except _AtRest:
                is_alone = False
                continue
            except WorkerDied as death:
                is_named = str(death).startswith(what)
                told = str(death) if is_named else f"{what}: {death}"
                if death.kind == "closed":
                    continue
                if death.kind == "killed":
                    raise GroupKilled(told, is_alone=is_alone) from None
                if is_alone or (is_named and death.kind == "hung"):
                    return fail(problem, (CallTimeout if death.kind == "hung" else WorkerCrashed)(told))
                is_alone = True
                continue
            if _is_out_of_memory(ended) and not is_alone:
                is_alone = True  # others may have filled it
                continue
            if isinstance(ended, messages.Failed):
                error = error_of(ended)
                raise GroupKilled(ended.message, is_alone=is_alone) if isinstance(error, ProcessKilled) else error
            return ended.dropped or ended.rollouts

    async def _play(self, problem: Problem, step: int, sampler: TurnSampler) -> messages.Played | messages.Failed:
        slot = min(range(len(self._slots)), key=lambda slot: one.num_groups if (one := self._slots[slot]) else 0)
        worker = self._worker(slot)
        ended = await worker.play(problem, step, sampler)
        if _is_out_of_memory(ended):
            await worker.close()  # it would not free its memory
        return ended

    async def _play_alone(self, problem: Problem, step: int, sampler: TurnCache) -> messages.Played | messages.Failed:
        """Return the result of a group from a worker of its own.

        Raises _AtRest if it waits for the next round, for which other groups may need the place of this worker."""
        async with self._alone:
            worker = self._new()
            playing = asyncio.create_task(worker.play(problem, step, sampler, is_alone=True))
            try:
                if playing not in await race(playing, sampler.rest()):
                    raise _AtRest
                return playing.result()
            finally:
                await worker.close()


class _AtRest(Exception):
    """A group that has a worker of its own has done no harm, and waits for the next round."""


def _is_out_of_memory(ended: messages.Played | messages.Failed) -> bool:
    if isinstance(ended, messages.Failed):
        return ended.kind == "memory"
    return ended.dropped is not None and ended.dropped.reason == "memory"


@asynccontextmanager
async def starting_workers(config: OrchestratorConfig) -> AsyncIterator[dict[str, Workers]]:
    """Give the workers of all environments that have some, by name, until the end of the context."""
    async with AsyncExitStack() as stack:
        workers = [Workers(section, config) for section in config.environments if section.workers]
        yield {one.name: await stack.enter_async_context(one) for one in workers}


class TurnCache:
    """Samples each turn of a group once, however often the group is played.

    Attributes:
        asking: the sessions, by `sample_index`, that wait for a turn.
        changed: set when a session begins to wait, or has ended.
        is_resting: whether all other sessions wait for the next round.
    """

    def __init__(self, sampler: TurnSampler) -> None:
        self._sampler = sampler
        # By seed, limit and digest of the prompt: the prompts of long sessions would fill the memory.
        self._turns: dict[tuple[int, int, bytes], asyncio.Task[Completion]] = {}
        self.asking: set[int] = set()
        self.changed = asyncio.Event()
        self.is_resting: Callable[[], bool] = lambda: False

    def begin_again(self) -> None:
        """Note that the group is played from its beginning, perhaps once more."""
        self.asking.clear()

    async def sample(self, turn: TurnRequest) -> Completion:
        key = (turn.seed, turn.max_tokens, xxhash.xxh3_128_digest(array("q", turn.token_ids).tobytes()))
        if key in self._turns and self._turns[key].done():
            await asyncio.sleep(0)  # an environment that asks in a loop must not block others
        if key not in self._turns:
            self._turns[key] = asyncio.create_task(self._sampler.sample(turn))
        self.asking.add(turn.sample_index)
        self.changed.set()
        try:
            return await asyncio.shield(self._turns[key])
        finally:
            self.asking.discard(turn.sample_index)

    def leave(self, sample_index: int) -> None:
        self._sampler.leave(sample_index)
        self.changed.set()

    async def rest(self) -> None:
        """Wait until all sessions that have not ended wait for the next round; for ever without rounds."""
        while not self.is_resting():
            self.changed.clear()
            await self.changed.wait()

    def check(self) -> None:
        self._sampler.check()

    def close(self) -> None:
        """Sample nothing more for the group."""
        for turn in self._turns.values():
            if not turn.cancel() and not turn.cancelled():
                turn.exception()  # known to the sampler


@dataclass(frozen=True)
class GroupPlayer:
    """Plays groups: by the workers of their environment if it has some, otherwise here."""

    config: OrchestratorConfig
    tokenizer: Tokenizer
    sampler: TurnSampler
    workers: Mapping[str, Workers]

    async def play(self, problem: Problem, step: int, *, turns: TurnCache | None = None) -> Outcome:
        """Return what `run_group` does; a group whose process is killed from outside is played again."""
        turns = turns or TurnCache(self.sampler)
        try:
            outcome = await self._play_until_it_ends(problem, step, turns)
        finally:
            turns.close()
        for rollout in [] if isinstance(outcome, Dropped) else outcome:
            # Here, since workers only know `max_tokens`.
            rollout.sampling = self.config.rollouts_of(problem.settings).sampling
        return outcome

    async def _play_until_it_ends(self, problem: Problem, step: int, sampler: TurnCache) -> Outcome:
        told, is_alone = "", False
        for num_killed in range(MOST_KILLED + 1):
            if told:
                _log.warning("%s: the group is played again", told)
            try:
                if (there := self.workers.get(problem.name)) is not None:
                    return await there.play(problem, step, sampler, is_alone=is_alone)
                sampler.begin_again()
                return await run_group(problem, step, config=self.config, tokenizer=self.tokenizer, sampler=sampler)
            except ProcessKilled as error:
                sampler.check()
                told = str(error)
                is_alone = num_killed > 0 or (isinstance(error, GroupKilled) and error.is_alone)
        return fail(problem, EnvironmentFailure(f"{told}, {MOST_KILLED + 1} times in a row"))


def fail(problem: Problem, failure: EnvironmentFailure) -> Dropped:
    """Return that the group is dropped for `failure`, or raise it, as `on_error` says."""
    if problem.settings.on_error == "stop":
        raise failure
    return dropped(problem, failure)
