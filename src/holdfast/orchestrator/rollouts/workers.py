"""The workers of an environment: processes that play its groups, and what follows when one of them dies.

A worker that dies takes the groups along that it played. They are played again in another one, where everything that
was sampled for them comes from the log of generations, so nothing is sampled twice and the result is the same. Whose
fault it was is read from memory that the worker shares: the group whose code ran last.

    how a worker dies                    the group whose code ran               the others
    it blocks beyond `timeout_s`         fails: timeout                         played again
    it exits, or of a signal             played again once, then fails: crash   played again
    it is out of memory                  played again alone, then fails: memory played again
    nobody's code ran                    all are played again, each alone
    SIGKILL, which is somebody else's    all are played again
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from holdfast.orchestrator.engines.routing import Affinity
from holdfast.orchestrator.environments.calls import CallTimeout
from holdfast.orchestrator.rollouts.group import (
    Outcome,
    Problem,
    TurnSampler,
    WorkerCrashed,
    context_of,
    dropped,
    run_group,
)
from holdfast.orchestrator.rollouts.worker_link import WorkerDied, WorkerLink, error_of
from holdfast.orchestrator.rollouts.worker_wire import Failed, Played
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.config.environments import EnvironmentConfig
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.errors import EnvironmentFailure
from holdfast.shared.wire.inference_api import Completion
from holdfast.shared.wire.rollouts import Dropped
from holdfast.shared.wire.sampling import Sampling

_MOST_DEATHS = 20
"""Deaths of workers in a row, without a group that was played to its end, of which no group is guilty."""
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
            self.num_tasks = (await asyncio.gather(*(link.start() for link in self._links)))[0]
        except BaseException:
            await self.rest()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rest()

    async def rest(self) -> None:
        """End the processes; what is played later starts them again."""
        await asyncio.gather(*(link.close() for link in self._links))

    def _new_link(self) -> WorkerLink:
        return WorkerLink(self._settings, self._config)

    async def play(self, problem: Problem, step: int, *, sampler: TurnSampler) -> Outcome:
        """Return what `run_group` would, from a worker.

        Raises:
            As `run_group`; `WorkerCrashed`: the group ends its worker again and again.
        """
        remembering = _Remembering(sampler)
        try:
            return await self._play_until_it_ends(problem, step, remembering)
        finally:
            remembering.close()

    async def _play_until_it_ends(self, problem: Problem, step: int, sampler: TurnSampler) -> Outcome:
        is_alone, num_crashes = False, 0
        while True:
            try:
                ended = await (self._play_alone if is_alone else self._play)(problem, step, sampler)
            except WorkerDied as death:
                is_guilty = death.kind != "killed" and (is_alone or death.is_mine)
                self._count(death, is_guilty=is_guilty)
                if is_guilty and death.kind == "hung":
                    return self._failed(problem, CallTimeout(f"{context_of(problem)}: {death.told}"))
                num_crashes += is_guilty
                if num_crashes > _MOST_CRASHES:
                    return self._failed(problem, WorkerCrashed(f"{context_of(problem)}: {death.told}"))
                is_alone = is_alone or (death.kind == "crashed" and not death.group)
                continue
            self._deaths = 0
            if _is_out_of_memory(ended) and not is_alone:
                is_alone = True  # others may have filled it
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
        if self._deaths > _MOST_DEATHS:
            raise EnvironmentFailure(
                f"environment '{self._settings.label}': {self._deaths} workers in a row ended before a group was "
                f"played to its end; the last: {death.told}. Take fewer `workers`, or set `worker_memory_gb`."
            )

    def _failed(self, problem: Problem, failure: EnvironmentFailure) -> Dropped:
        if self._settings.on_error == "stop":
            raise failure
        return dropped(problem, failure)


class _Remembering:
    """Samples each turn of a group once, however often the group is played; also one that is asked for at a death."""

    def __init__(self, sampler: TurnSampler) -> None:
        self._sampler = sampler
        self._turns: dict[tuple[int, tuple[int, ...]], asyncio.Task[Completion]] = {}

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return one continuation of `token_ids`."""
        key = (seed, tuple(token_ids))
        if key not in self._turns:
            asked = self._sampler.sample(
                token_ids, sampling=sampling, max_tokens=max_tokens, seed=seed, affinity=affinity
            )
            self._turns[key] = asyncio.create_task(asked)
        return await asyncio.shield(self._turns[key])

    def check(self) -> None:
        """Raise what an engine has failed with, if one has."""
        self._sampler.check()

    def close(self) -> None:
        """Let nothing more be sampled for the group."""
        for turn in self._turns.values():
            if not turn.cancel() and not turn.cancelled():
                turn.exception()  # known to the sampler


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
        outcome = await run_group(problem, step, config=config, tokenizer=tokenizer, sampler=sampler)
    for rollout in [] if isinstance(outcome, Dropped) else outcome:
        # Here, since workers only know for how long is sampled.
        rollout.sampling = config.rollouts_of(problem.settings).sampling
    return outcome
