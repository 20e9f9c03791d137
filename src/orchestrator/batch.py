"""Makes batches: chooses the problems, runs their groups, and moves the counters on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from orchestrator.client import InferenceClient
from orchestrator.concurrency import run_all
from orchestrator.environment import Environment
from orchestrator.generations import GenerationLog
from orchestrator.mix import next_environment
from orchestrator.rollout import Problem, run_group
from orchestrator.sampler import Sampler
from orchestrator.seeds import TaskSeed
from orchestrator.state import OrchestratorState
from orchestrator.tokenizer import Tokenizer
from orchestrator.weights import PublishedWeights
from triad.config.orchestrator import OrchestratorConfig
from triad.messages import Rollout
from triad.run_dir import RunDir


class BatchMaker:
    """Generates the rollouts of one batch after another; `state` always belongs to the last whole batch."""

    def __init__(
        self,
        config: OrchestratorConfig,
        client: InferenceClient,
        *,
        run_dir: RunDir,
        tokenizer: Tokenizer,
        environments: Mapping[str, Environment],
        state: OrchestratorState,
    ) -> None:
        self._config = config
        self._client = client
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._environments = environments
        self.state = state
        self.num_reused = 0

    async def make(self, step: int, weights: PublishedWeights) -> list[Rollout]:
        """Return the rollouts of batch `step`, problem by problem, sampled by `weights`.

        Raises:
            EnvironmentFailure: an environment raised or broke its contract.
            InferenceError: an engine failed, or another version answered.
        """
        state = self.state.copy()
        problems = self._choose_problems(state)
        sampler = self._sampler(step, weights)
        # Whole groups pass at a time, so that a group's first turns can share one request.
        slots = asyncio.Semaphore(max(1, self._config.client.max_concurrency // self._config.group_size))

        async def in_turn(problem: Problem) -> list[Rollout]:
            async with slots:
                return await run_group(problem, step, config=self._config, tokenizer=self._tokenizer, sampler=sampler)

        try:
            groups = await run_all(in_turn(problem) for problem in problems)
        finally:
            await sampler.close()
        rollouts = [rollout for group in groups for rollout in group]
        _count(state, step, rollouts, num_problems=len(problems))
        self.state = state
        self.num_reused = sampler.num_reused
        return rollouts

    def _choose_problems(self, state: OrchestratorState) -> list[Problem]:
        problems = []
        for position in range(self._config.problems_per_step):
            name = next_environment(state)
            index = state.environments[name].next_task
            state.environments[name].next_task += 1
            seed = TaskSeed(run_seed=self._config.seed, environment=name, index=index)
            engine = position % self._client.num_engines
            problems.append(Problem(name=name, environment=self._environments[name], seed=seed, engine=engine))
        return problems

    def _sampler(self, step: int, weights: PublishedWeights) -> Sampler:
        temperature, stops = (self._config.sampling.temperature, self._tokenizer.stop_token_ids)
        log = GenerationLog(
            self._run_dir, step, weights_digest=weights.digest, temperature=temperature, stop_token_ids=stops
        )
        return Sampler(self._client, log, version=weights.version, temperature=temperature, stop_token_ids=stops)


def _count(state: OrchestratorState, step: int, rollouts: Sequence[Rollout], *, num_problems: int) -> None:
    state.step = step
    state.problems += num_problems
    state.rollouts += len(rollouts)
    state.tokens += sum(len(rollout.token_ids) for rollout in rollouts)
    state.sampled_tokens += sum(sum(rollout.loss_mask) for rollout in rollouts)
