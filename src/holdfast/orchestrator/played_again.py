"""Groups that are played again because a process that played them died: what is kept, and when that is given up."""

from __future__ import annotations

import asyncio
import logging
from array import array

import xxhash

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import MOST_KILLED, EnvironmentFailure, ProcessKilled
from holdfast.orchestrator.client.client import Affinity
from holdfast.orchestrator.episodes import Outcome, Problem, TurnSampler, dropped, run_group
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Dropped, Sampling

_log = logging.getLogger("orchestrator")


async def play_here(
    problem: Problem, step: int, *, config: OrchestratorConfig, tokenizer: Tokenizer, sampler: TurnSampler
) -> Outcome:
    """Return what `run_group` does, which is called again if a process of the environment's own was killed."""
    remembering, killed = Remembering(sampler), Killed(problem)
    try:
        while True:
            try:
                return await run_group(problem, step, config=config, tokenizer=tokenizer, sampler=remembering)
            except ProcessKilled as error:
                sampler.check()
                if (failure := killed.count(str(error))) is not None:
                    return fail(problem, failure)
    finally:
        remembering.close()


class Remembering:
    """Samples each turn of a group once, however often the group is played; also one that is asked for at a death."""

    def __init__(self, sampler: TurnSampler) -> None:
        self._sampler = sampler
        # By seed and digest of the prompt: the prompts of long sessions would fill the memory.
        self._turns: dict[tuple[int, bytes], asyncio.Task[Completion]] = {}

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return one continuation of `token_ids`."""
        key = (seed, xxhash.xxh3_128_digest(array("q", token_ids).tobytes()))
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


class Killed:
    """How often a process of an environment's own was killed from outside while `problem` was played."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._number = 0

    def count(self, told: str) -> EnvironmentFailure | None:
        """Say that the group is played again; return a failure if that has been in vain too often."""
        self._number += 1
        if self._number > MOST_KILLED:
            return EnvironmentFailure(f"{told}, {self._number} times in a row")
        _log.warning("%s: the group is played again", told)
        return None


def fail(problem: Problem, failure: EnvironmentFailure) -> Dropped:
    """Return that the group is dropped for `failure`, or raise it, as `on_error` says."""
    if problem.settings.on_error == "stop":
        raise failure
    return dropped(problem, failure)
