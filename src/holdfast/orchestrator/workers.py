"""Worker processes of an environment: they play its prompt groups, and groups of dead workers are played again.

`WorkerLink` is one worker as the orchestrator sees it: started, given groups, watched, ended. If a worker dies, another
worker plays its groups again. The log of generations has everything that was sampled for them, so nothing is sampled
twice and the result is the same. Memory shared with the worker shows whose code ran last, and so which group is at
fault.

    how a worker dies                    the group whose code ran               the others
    it blocks beyond `timeout_s`         fails: timeout                         played again
    it exits, or of a signal             played again once, then fails: crash   played again
    it is out of memory                  played again alone, then fails: memory played again
    nobody's code ran                    all are played again, each alone
    a signal of somebody else's          all are played again
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec

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
    printable,
)
from holdfast.orchestrator.env.guard import CallTimeout
from holdfast.orchestrator.env.judge import JUDGES, JudgeFailure
from holdfast.orchestrator.episodes import (
    Killed,
    Outcome,
    Problem,
    Remembering,
    TurnSampler,
    WorkerCrashed,
    context_of,
    fail,
    play_here,
)
from holdfast.orchestrator.worker_protocol import (
    Ask,
    AskJudge,
    Asks,
    Cancel,
    Failed,
    Judged,
    Play,
    Played,
    Ready,
    Sampled,
    SharedPosition,
    StartWorker,
    ToWorker,
    WorkerPosition,
    frame,
    read_from_worker,
)
from holdfast.process.child import killed_by
from holdfast.process.heartbeat import awake_s
from holdfast.process.imports import module_command
from holdfast.protocol.rollouts import Dropped, Sampling

_log = logging.getLogger("orchestrator")

_LOOK_S = 1.0
_GRACE_S = 15.0
"""Beyond the deadline: a worker ends itself, with the line that blocks, unless a call of C keeps all its threads."""
_END_S = 5.0
_MOST_OUTPUT = 1 << 16
_TAIL = 1 << 13

DeathKind = Literal["crashed", "hung", "killed"]


class WorkerDied(Exception):
    """A worker ended, with a group in it.

    Attributes:
        kind: `crashed`: it exited, or of a signal; `hung`: code blocked it for too long; `killed`: by somebody else.
        group: whose code ran, by number; 0: none's.
        is_mine: whether it is the group that this is raised for.
        told: how it ended, for messages.
        process_id: of the worker.
    """

    def __init__(self, kind: DeathKind, group: int, *, is_mine: bool, told: str, process_id: int) -> None:
        super().__init__(told)
        self.kind: DeathKind = kind
        self.group = group
        self.is_mine = is_mine
        self.told = told
        self.process_id = process_id


@dataclass
class _PlayedGroup:
    problem: Problem
    sampler: TurnSampler
    ended: asyncio.Future[Played | Failed]
    turns: set[asyncio.Task[None]] = field(default_factory=set)


class WorkerLink:
    """A worker that is started when it is needed, and again after its death."""

    def __init__(self, settings: EnvironmentConfig, config: OrchestratorConfig) -> None:
        self._settings = settings
        self._config = config
        self._beginning: asyncio.Task[_Running] | None = None
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self.num_groups = 0

    async def start(self) -> int | None:
        """Start it, unless it is there; return how many tasks the environment has, None where they have no end.

        Raises:
            ConfigError, DataError, EnvironmentFailure: the environment cannot be loaded.
            WorkerDied: somebody killed it meanwhile.
        """
        async with self._starting:
            running = self._running
            if running is None or running.is_over:
                await self._end()
                # Shielded: a process that has begun is ended by `close`, whoever no longer waits for it.
                begun = _Running.begin(self._settings, self._config)
                self._beginning = asyncio.create_task(begun)
                self._running = running = await asyncio.shield(self._beginning)
            return await asyncio.shield(running.is_ready)  # others may wait for it too

    async def play(self, problem: Problem, step: int, sampler: TurnSampler) -> Played | Failed:
        """Return what became of the group.

        Raises:
            WorkerDied: the worker did not survive it.
            ConfigError, DataError, EnvironmentFailure: the environment cannot be loaded any more.
        """
        self.num_groups += 1
        try:
            await self.start()
            assert self._running is not None
            return await self._running.play(problem, step, sampler)
        finally:
            self.num_groups -= 1

    async def close(self) -> None:
        """End it."""
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        beginning, self._beginning, self._running = self._beginning, None, None
        # One that could not be started has told so.
        if beginning is not None and (not beginning.done() or beginning.exception() is None):
            await (await beginning).close()


class _Running:
    """A worker process, from its start to its end."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        place: SharedPosition,
        *,
        name: str,
        sampling: Sampling,
        bound_s: float,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._place = place
        self._name = name
        self._sampling = sampling
        self._bound_s = bound_s
        self._groups: dict[int, _PlayedGroup] = {}
        self._numbers = itertools.count(1)
        self._output = _WorkerOutput(process, name)
        self._kind: DeathKind | None = None
        self._unreadable = ""
        self.is_over = False
        self.is_ready: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.is_ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._ending = asyncio.create_task(self._live())
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def begin(cls, settings: EnvironmentConfig, config: OrchestratorConfig) -> _Running:
        """Start a worker, which is ready when it has loaded the environment."""
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("holdfast-worker", os.MFD_CLOEXEC)
        os.truncate(memory, SharedPosition.SIZE)
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command(
                    "holdfast.orchestrator.worker",
                    *map(str, (os.getpid(), theirs.fileno(), memory)),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(), memory),
                start_new_session=True,  # with all that it starts it can be ended at once
            )
            place = SharedPosition(memory)
        finally:
            theirs.close()
            os.close(memory)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        deadline_s = min(settings.deadline_s or config.hang_timeout_s, config.hang_timeout_s)
        bound_s = deadline_s + _GRACE_S
        sampling = config.rollouts_of(settings).sampling
        running = cls(process, reader, writer, place, name=settings.label, sampling=sampling, bound_s=bound_s)
        # Who plays knows for how long alone: an evaluation may sample as no training can.
        plain = config.model_copy(update={"sampling": SamplingConfig(max_tokens=config.sampling.max_tokens)})
        running._send(StartWorker(plain.model_dump_json(), settings.label))
        return running

    async def play(self, problem: Problem, step: int, sampler: TurnSampler) -> Played | Failed:
        number = next(self._numbers)
        group = self._groups[number] = _PlayedGroup(problem, sampler, asyncio.get_running_loop().create_future())
        try:
            if self.is_over:
                raise WorkerDied("killed", 0, is_mine=False, told="it ended before", process_id=self._process.pid)
            seed = problem.seed
            self._send(Play(number, problem.task_id, seed, step))
            return await group.ended
        finally:
            del self._groups[number]
            for turn in group.turns:
                turn.cancel()
            if not group.ended.done() or group.ended.cancelled() or group.ended.exception() is not None:
                self._send(Cancel(number))

    async def close(self) -> None:
        """Let the process end, or kill it with all that it has started."""
        self._writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        self._kill()
        await self._ending

    def _send(self, message: ToWorker) -> None:
        if not self.is_over and not self._writer.is_closing():
            self._writer.write(frame(message))

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _live(self) -> None:
        """Take what the worker says, until its end."""
        try:
            while True:
                match await read_from_worker(self._reader):
                    case Ready(num_tasks=num_tasks):
                        self.is_ready.set_result(num_tasks)
                    case Asks(asks=asks):
                        for ask in asks:
                            self._ask(ask)
                    case AskJudge() as ask:
                        self._ask_judge(ask)
                    case Failed(group=0) as failed:
                        self.is_ready.set_exception(error_of(failed))
                    case (Played() | Failed()) as ended:
                        group = self._groups.get(ended.group)
                        if group is not None and not group.ended.done():
                            group.ended.set_result(ended)
        except (EOFError, ConnectionError):
            await self._end()
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
        ) as error:  # somebody else has written there: nothing that follows can be read
            self._unreadable = str(error)
            self._kill()
            await self._end()

    def _ask(self, ask: Ask) -> None:
        group = self._groups.get(ask.group)
        if group is None:
            return  # nobody waits for it any more

        async def sample() -> None:
            token_ids = ask.token_ids.tolist()
            affinity = group.problem.affinity
            completion = await group.sampler.sample(
                token_ids, sampling=self._sampling, max_tokens=ask.max_tokens, seed=ask.seed, affinity=affinity
            )
            self._send(Sampled(ask.request, completion))

        self._begin(sample(), group)

    def _ask_judge(self, ask: AskJudge) -> None:
        group = self._groups.get(ask.group)
        if group is None:
            return

        async def judge() -> None:
            try:
                judged = Judged(ask.number, await JUDGES.get().ask(ask.request))
            except JudgeFailure as failure:
                judged = Judged(ask.number, failure=str(failure), reason=failure.reason)
            self._send(judged)

        self._begin(judge(), group)

    def _begin(self, work: Coroutine[Any, Any, None], group: _PlayedGroup) -> None:
        """Do what a group waits for, as long as it does."""
        turn = asyncio.create_task(work)
        group.turns.add(turn)
        turn.add_done_callback(_taken(group))

    async def _watch(self) -> None:
        """End the worker when it has come no further for too long: none of its threads may be able to."""
        await asyncio.wait([self.is_ready])  # how long it may take to load is nobody's to say
        last, since = WorkerPosition(0, 0, 0), awake_s()
        while True:
            await asyncio.sleep(_LOOK_S)
            place = self._place.read()
            if place != last:
                last, since = place, awake_s()
            elif awake_s() - since > self._bound_s:
                self._kind = "hung" if place.group and not self._is_stopped() else "killed"
                self._kill()
                return

    def _is_stopped(self) -> bool:
        import psutil  # takes 0.03 s, and few processes come here

        try:
            return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    async def _end(self) -> None:
        """Tell everybody who waits how it ended."""
        self.is_over = True
        try:
            async with asyncio.timeout(_END_S):
                code = await self._process.wait()
        except TimeoutError:  # it has closed its socket, and goes on
            self._kill()
            code = await self._process.wait()
        self._kill()  # what it has started
        self._watching.cancel()
        await self._output.read_whole()
        place = WorkerPosition(0, 0, 0) if self._unreadable else self._place.read()
        self._place.close()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        kind, told = self._how_it_ended(code)
        if not self.is_ready.done():
            what = f"environment '{self._name}': a worker ended while it loaded it: {told}"
            killed = WorkerDied(kind, 0, is_mine=False, told=told, process_id=self._process.pid)
            self.is_ready.set_exception(killed if kind == "killed" else EnvironmentFailure(what))
        if self._groups:
            _log.warning("a worker of environment '%s' ended with %d groups: %s", self._name, len(self._groups), told)
        for number, group in self._groups.items():
            if not group.ended.done():
                is_mine = number == place.group
                group.ended.set_exception(
                    WorkerDied(kind, place.group, is_mine=is_mine, told=told, process_id=self._process.pid)
                )

    def _how_it_ended(self, code: int) -> tuple[DeathKind, str]:
        last = self._output.last_line()
        if self._unreadable:
            return "crashed", f"what its worker said cannot be read ({self._unreadable})"
        if code == STUCK:
            return "hung", last.removeprefix("error: ")
        if self._kind == "hung":
            return "hung", f"its worker made no progress for {self._bound_s:g} s, and was killed"
        by = signal.SIGKILL if self._kind == "killed" else killed_by(code)
        if by is not None:
            why = "; the kernel does so when memory runs out" if by == signal.SIGKILL else ""
            return "killed", f"somebody killed it ({by.name}){why}"
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return "crashed", f"its worker process {how}" + (f"; its last words: {last}" if last else "")


class _WorkerOutput:
    """What a worker prints: taken as fast as it comes, shown up to a limit, and its end kept."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._name = name
        self._tail = b""
        self._reading = asyncio.create_task(self._read())

    async def read_whole(self) -> None:
        """Return when all has been read; processes that the worker has started are gone by now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._reading

    def last_line(self) -> str:
        """Return the last line that says something."""
        lines = self._tail.decode(errors="backslashreplace").split("\n")
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")

    async def _read(self) -> None:
        left = _MOST_OUTPUT
        while part := await self._stream.read(1 << 16):
            self._tail = (self._tail + part)[-_TAIL:]
            if left > 0:
                sys.stderr.write(part[:left].decode(errors="backslashreplace"))
                left -= len(part)
                if left <= 0:
                    _log.warning("a worker of environment '%s' prints more than is shown", self._name)


def error_of(failed: Failed) -> HoldfastError:
    """Return the error that a worker met."""
    kinds: dict[str, type[HoldfastError]] = {"config": ConfigError, "data": DataError}
    return kinds.get(failed.kind, EnvironmentFailure)(failed.message)


def _taken(group: _PlayedGroup) -> Callable[[asyncio.Task[None]], None]:
    """Return what takes a turn out when it is done, and ends the group with its failure."""

    def take(turn: asyncio.Task[None]) -> None:
        group.turns.discard(turn)
        error = None if turn.cancelled() else turn.exception()
        if error is not None and not group.ended.done():
            group.ended.set_exception(error)  # nobody will answer the worker, which would wait for ever

    return take


_MOST_CRASHES = 1
"""Crashes of a group that are forgiven: a machine may be at fault."""


class Workers:
    """The worker processes of one environment. Use as an async context manager: they live as long.

    Attributes:
        name: of the environment.
        num_tasks: how many tasks it has, None where they have no end; known once the workers are there.
    """

    def __init__(self, settings: EnvironmentConfig, config: OrchestratorConfig) -> None:
        self._settings = settings
        self._config = config
        self._links: list[WorkerLink] = [self._new_link() for _ in range(settings.workers)]
        self._alone = asyncio.Lock()
        self._deaths = 0
        self._dead: set[int] = set()
        self.name = settings.label
        self.num_tasks: int | None = None

    async def __aenter__(self) -> Self:
        """Start all of them.

        Raises:
            ConfigError, DataError, EnvironmentFailure: the environment cannot be loaded.
        """
        try:
            self.num_tasks = (await asyncio.gather(*map(self._start, self._links)))[0]
        except BaseException:
            await self.rest()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rest()

    async def rest(self) -> None:
        """End the processes; what is played later starts them again."""
        await asyncio.gather(*(link.close() for link in self._links))

    async def _start(self, link: WorkerLink) -> int | None:
        while True:
            try:
                return await link.start()
            except WorkerDied as death:
                self._count(death, is_guilty=False)

    def _new_link(self) -> WorkerLink:
        return WorkerLink(self._settings, self._config)

    async def play(self, problem: Problem, step: int, *, sampler: TurnSampler) -> Outcome:
        """Return what `run_group` would, from a worker.

        Raises:
            As `run_group`; `WorkerCrashed`: the group ends its worker again and again.
        """
        remembering = Remembering(sampler)
        try:
            return await self._play_until_it_ends(problem, step, remembering)
        finally:
            remembering.close()

    async def _play_until_it_ends(self, problem: Problem, step: int, sampler: TurnSampler) -> Outcome:
        is_alone, num_crashes, killed = False, 0, Killed(problem)
        while True:
            try:
                ended = await (self._play_alone if is_alone else self._play)(problem, step, sampler)
            except WorkerDied as death:
                if death.kind == "killed" and death.is_mine:  # by itself, if that comes again and again
                    failure = killed.count(f"{context_of(problem)}: {death.told}")
                    if failure is not None:
                        return fail(problem, failure)
                is_guilty = death.kind != "killed" and (is_alone or death.is_mine)
                self._count(death, is_guilty=is_guilty)
                if is_guilty and death.kind == "hung":
                    return fail(problem, CallTimeout(f"{context_of(problem)}: {death.told}"))
                num_crashes += is_guilty
                if num_crashes > _MOST_CRASHES:
                    return fail(problem, WorkerCrashed(f"{context_of(problem)}: {death.told}"))
                is_alone = is_alone or (death.kind == "crashed" and not death.group)
                continue
            self._deaths = 0
            if _is_out_of_memory(ended) and not is_alone:
                is_alone = True  # others may have filled it
                continue
            if isinstance(ended, Failed) and ended.kind == "killed":
                if (failure := killed.count(ended.message)) is not None:
                    return fail(problem, failure)
                continue
            if isinstance(ended, Failed):
                raise error_of(ended)
            return ended.dropped or ended.rollouts

    async def _play(self, problem: Problem, step: int, sampler: TurnSampler) -> Played | Failed:
        link = min(self._links, key=lambda link: link.num_groups)
        ended = await link.play(problem, step, sampler)
        if _is_out_of_memory(ended):
            await link.close()  # what it holds on to, it would not give back
        return ended

    async def _play_alone(self, problem: Problem, step: int, sampler: TurnSampler) -> Played | Failed:
        async with self._alone:
            link = self._new_link()
            try:
                return await link.play(problem, step, sampler)
            finally:
                await link.close()

    def _count(self, death: WorkerDied, *, is_guilty: bool) -> None:
        """Count a death once, however many groups it took along.

        Raises:
            EnvironmentFailure: nothing comes of starting workers again.
        """
        if is_guilty or death.process_id in self._dead:
            return
        self._dead.add(death.process_id)
        self._deaths += 1
        if self._deaths > MOST_KILLED:
            raise EnvironmentFailure(
                f"environment '{self._settings.label}': {self._deaths} workers in a row ended before a group was "
                f"played to its end; the last: {death.told}. Take fewer `workers`, or set `worker_memory_gb`."
            )


def _is_out_of_memory(ended: Played | Failed) -> bool:
    if isinstance(ended, Failed):
        return ended.kind == "memory"
    return ended.dropped is not None and ended.dropped.reason == "memory"


@asynccontextmanager
async def starting_workers(config: OrchestratorConfig) -> AsyncIterator[dict[str, Workers]]:
    """Give the workers of every environment that has some, by its name, until the end of the context.

    Raises:
        ConfigError, DataError, EnvironmentFailure: an environment cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        workers = [Workers(section, config) for section in config.environments if section.workers]
        yield {one.name: await stack.enter_async_context(one) for one in workers}


async def play_group(
    problem: Problem,
    step: int,
    *,
    config: OrchestratorConfig,
    tokenizer: Tokenizer,
    sampler: TurnSampler,
    workers: Mapping[str, Workers],
) -> Outcome:
    """Return what `run_group` does, played by the workers of its environment if it has some, else here.

    Raises:
        As `run_group` and `Workers.play`.
    """
    there = workers.get(problem.name)
    if there is not None:
        outcome = await there.play(problem, step, sampler=sampler)
    else:
        outcome = await play_here(problem, step, config=config, tokenizer=tokenizer, sampler=sampler)
    for rollout in [] if isinstance(outcome, Dropped) else outcome:
        # Here, since workers only know for how long is sampled.
        rollout.sampling = config.rollouts_of(problem.settings).sampling
    return outcome
