"""Plays one prompt group: runs the sessions of one task, and scores them together.

`Sampler` gathers equal prompts into one request to the engines, and logs every answer.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.environments import EnvironmentConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import EnvironmentFailure, HoldfastError
from holdfast.orchestrator.client.client import Affinity, InferenceClient
from holdfast.orchestrator.env import guard
from holdfast.orchestrator.env.harness import HarnessEnvironment, request_metrics
from holdfast.orchestrator.env.interface import Environment, Score, Session, SessionFull, Task
from holdfast.orchestrator.env.judge import JudgeFailure
from holdfast.orchestrator.env.tool_loop import ToolUse, tool_metrics, tool_use_of
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.orchestrator.state import TaskSeed, request_seed
from holdfast.orchestrator.tasks import FirstFailure, run_all
from holdfast.process.heartbeat import moved
from holdfast.protocol.inference import Completion, GenerateRequest
from holdfast.protocol.rollouts import Dropped, DropReason, Rollout, Sampling, VersionSpan

_log = logging.getLogger("orchestrator")

# The result of one problem: its group of scored rollouts, or the reason of its failure.
Outcome = list[Rollout] | Dropped


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A turn of a session that is to be sampled, or a part of the turn.

    Attributes:
        token_ids: of the session so far.
        sample_index: of the session in its group.
        max_tokens: that the turn may have.
        affinity: of the group, whose sessions begin with the same tokens.
    """

    token_ids: list[int]
    sample_index: int
    sampling: Sampling
    max_tokens: int
    seed: int
    affinity: Affinity


class TurnSampler(Protocol):
    """Samples the turns of sessions: a `Sampler`, or a link to one."""

    def check(self) -> None:
        """Raise the failure of an engine or of the log, if there is one."""
        ...

    async def sample(self, turn: TurnRequest) -> Completion:
        """Return one continuation of the token ids of `turn`."""
        ...

    def leave(self, sample_index: int) -> None:
        """Note that a session of the group has been played to its end."""
        ...


class WorkerCrashed(EnvironmentFailure):
    """The worker process died of the group that it played."""


@dataclass(frozen=True)
class Problem:
    """One problem of a batch.

    Attributes:
        environment: None if workers play it.
        number: of the task among all tasks of the environment; `seed.index` counts within a level.
        is_shared: its worker plays other groups, too, which may have filled the memory.
        affinity: of the group, whose sessions begin with the same tokens.
    """

    environment: Environment | None
    settings: EnvironmentConfig
    seed: TaskSeed
    number: int | None = None
    is_shared: bool = field(default=False, compare=False)
    affinity: Affinity = field(default_factory=Affinity, compare=False)

    @property
    def here(self) -> Environment:
        assert self.environment is not None
        return self.environment

    @property
    def name(self) -> str:
        return self.settings.label

    @property
    def task_id(self) -> int:
        return self.seed.index if self.number is None else self.number


async def run_group(
    problem: Problem, step: int, *, config: OrchestratorConfig, tokenizer: Tokenizer, sampler: TurnSampler
) -> Outcome:
    """Return the scored rollouts of `problem` for batch `step`, or why there are none.

    If `on_error` is `drop`, a failure does not stop the other sessions, so that the counts do not depend on timing.

    Raises EnvironmentFailure or PromptTooLong if `on_error` is `stop`; InferenceError or RunDirError if an engine or
    the log of generations failed, even if the environment caught that error."""
    sessions: list[Session] = []
    settings = config.rollouts_of(problem.settings)
    try:
        async with calling_of(problem, "make_task"):
            task = await guard.result_of(problem.here.make_task(problem.seed))
            tool_use = tool_use_of(problem.here, problem.settings, tokenizer)
            prompt_ids = prompt_ids_for(task, problem, tokenizer=tokenizer, seq_len=settings.seq_len, tool_use=tool_use)
        sample_turn = sample_turn_of(problem, step, sampler, sampling=settings.sampling)
        sessions += [
            Session(
                prompt_ids,
                tokenizer=tokenizer,
                sample_turn=functools.partial(sample_turn, index),
                seq_len=settings.seq_len,
                max_tokens=settings.max_tokens,
                task=task,
                tool_use=tool_use,
                keeps_history=problem.settings.history == "keep",
                max_branches=problem.settings.max_branches,
            )
            for index in range(settings.group_size)
        ]
        await _play_all(sessions, task, problem, sampler)
        scores = await score_sessions(sessions, task, problem)
    except (EnvironmentFailure, guard.PromptTooLong) as failure:
        # An environment may turn the failure of an engine into its own.
        sampler.check()
        if problem.settings.on_error == "stop":
            if failure.__cause__ is not None:
                _log.error("%s\n%s", failure, guard.traceback_of(failure.__cause__))
            raise
        tokens = sum(len(session.token_ids) for session in sessions)
        return dropped(problem, failure, num_sessions=len(sessions), num_tokens=tokens)
    finally:
        # Code that an environment has left running must sample nothing for a group that has failed.
        for session in sessions:
            session.end()
    return [
        _to_rollout(
            problem, index, session, score, right_answer(task), is_sampled_by_teacher=config.is_sampled_by_teacher
        )
        for index, (session, score) in enumerate(zip(sessions, scores, strict=True))
    ]


def is_solved(rollout: Rollout, success_reward: float | None) -> bool | None:
    """Return whether a rollout counts as solved: by its reward, else by its metric `exact`; None without either."""
    if success_reward is not None:
        return rollout.reward >= success_reward
    return rollout.metrics["exact"] >= 1.0 if "exact" in rollout.metrics else None


def right_answer(task: Any) -> str:
    """Return the right answer of a task for the journal: text as it is, plain values as JSON, nothing of others, whose
    text may differ from process to process."""
    answer = getattr(task, "answer", "")
    if not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return ""
    return answer.encode(errors="backslashreplace").decode()


def dropped(problem: Problem, failure: HoldfastError, *, num_sessions: int = 0, num_tokens: int = 0) -> Dropped:
    """Return that a group is left out for `failure`."""
    reasons: dict[type[HoldfastError], DropReason] = {
        guard.PromptTooLong: "prompt_too_long",
        guard.CallTimeout: "timeout",
        WorkerCrashed: "crash",
    }
    reason = failure.reason if isinstance(failure, JudgeFailure) else reasons.get(type(failure), "environment_error")
    _log.warning("%s: the group is dropped", failure)
    return Dropped(
        environment=problem.name,
        task_id=problem.task_id,
        reason="memory" if _is_out_of_memory(failure) else reason,
        rollouts=num_sessions,
        tokens=num_tokens,
        detail=str(failure),
    )


def _is_out_of_memory(failure: HoldfastError) -> bool:
    return isinstance(failure.__cause__, MemoryError)


def _to_rollout(
    problem: Problem, index: int, session: Session, score: Score, right_answer: str, *, is_sampled_by_teacher: bool
) -> Rollout:
    return Rollout(
        environment=problem.name,
        task_id=problem.task_id,
        sample_index=index,
        level=problem.seed.level,
        token_ids=session.token_ids,
        loss_mask=session.loss_mask,
        logprobs=session.logprobs,
        versions=[] if is_sampled_by_teacher else _merged(session.versions),
        reward=score.reward,
        truncated=session.truncated,
        metrics=score.metrics | tool_metrics(session) | request_metrics(session),
        right_answer=right_answer,
        step_rewards=guard.step_rewards(score, session),
        branch_starts=session.branch_starts,
    )


def prompt_ids_for(
    task: Task, problem: Problem, *, tokenizer: Tokenizer, seq_len: int, tool_use: ToolUse | None
) -> list[int]:
    """Return the token ids of the prompt of `task`; empty for a harness, which brings its own; see `prompt_ids_of`."""
    if isinstance(problem.here, HarnessEnvironment) and isinstance(task, Task):
        return []
    schemas = tool_use.schemas if tool_use else None
    return guard.prompt_ids_of(task, tokenizer, what=context_of(problem), seq_len=seq_len, tools=schemas)


def sample_turn_of(
    problem: Problem, step: int, sampler: TurnSampler, *, sampling: Sampling
) -> Callable[..., Awaitable[Completion]]:
    """Return a function that samples a turn of session `sample_index`, while the clock of the call stands still."""

    async def sample_turn(sample_index: int, token_ids: list[int], turn: int, max_tokens: int) -> Completion:
        seed = request_seed(problem.seed, step=step, sample_index=sample_index, turn=turn)
        with guard.pausing_clock():
            return await sampler.sample(
                TurnRequest(token_ids, sample_index, sampling, max_tokens, seed, problem.affinity)
            )

    return sample_turn


async def _play_all(sessions: Sequence[Session], task: Task, problem: Problem, sampler: TurnSampler) -> None:

    async def play(index: int, session: Session) -> EnvironmentFailure | None:
        failed: EnvironmentFailure | None = None
        try:
            await play_session(session, task, problem)
        except EnvironmentFailure as failure:
            if problem.settings.on_error == "stop" or (problem.is_shared and _is_out_of_memory(failure)):
                raise
            failed = failure
        sampler.leave(index)  # not if the group is played again from its beginning
        return failed

    # The first failure in the order of samples, not of time.
    for failure in await run_all(play(index, session) for index, session in enumerate(sessions)):
        if failure is not None:
            raise failure


async def play_session(session: Session, task: Task, problem: Problem) -> None:
    """Play one session to its end. Raises EnvironmentFailure if `run` raised, sampled nothing, or took too long."""
    async with calling_of(problem, "run"):
        try:
            await guard.result_of(problem.here.run(session, task))
        except SessionFull:
            session.truncated = True
        finally:
            session.leave()
    _require_ended(session, problem, "run")
    if not session.texts:
        raise EnvironmentFailure(
            f"{context_of(problem)}: run() ended without a sampled turn; write `await session.sample()` in "
            "an `async def run`"
        )


async def score_sessions(sessions: Sequence[Session], task: Task, problem: Problem) -> list[Score]:
    """Score and end the sessions of a group. Raises EnvironmentFailure if `score` raised, took too long, or returned
    something else."""
    async with calling_of(problem, "score"):
        found = await guard.result_of(problem.here.score(task, tuple(sessions)))
        for session in sessions:
            _require_ended(session, problem, "score")
            session.end()
            session.truncated = guard.checked_truncated(session, what=context_of(problem))
        return guard.checked_scores(found, sessions, what=context_of(problem))


def _require_ended(session: Session, problem: Problem, method: str) -> None:
    if session.is_sampling:
        raise EnvironmentFailure(
            f"{context_of(problem)}: {method}() ended while a session.sample() went on: await every sample()"
        )


def calling_of(problem: Problem, method: str) -> AbstractAsyncContextManager[None]:
    return guard.calling(
        context_of(problem),
        name=f"environment '{problem.name}', task {problem.task_id}",
        method=method,
        timeout_s=problem.settings.deadline_s,
    )


def context_of(problem: Problem) -> str:
    """Return how the failures of a problem begin."""
    return f"environment '{problem.name}' failed on task {problem.task_id} (seed {problem.seed.number})"


def _merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and (merged[-1].version, merged[-1].seed, merged[-1].end) == (span.version, span.seed, span.start):
            merged[-1] = VersionSpan(span.version, merged[-1].start, span.end, span.seed)
        else:
            merged.append(span)
    return merged


# Affinity, distribution, most tokens, prompt: turns with equal keys share a request.
_Key = tuple[Affinity, Sampling, int, tuple[int, ...]]


class Sampler:
    """Samples turns for the sessions of one batch, all by the weights of its log.

    Equal prompts in the same turn of the event loop become one request with several seeds, which the engine prefills
    once. `failure`, of an engine or of the log, ends the batch even if the environment catches it."""

    def __init__(self, client: InferenceClient, log: GenerationLog) -> None:
        self._client = client
        self._log = log
        self._gathering: dict[_Key, dict[int, asyncio.Future[Completion]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self.failure = FirstFailure()
        self.num_reused = 0

    def check(self) -> None:
        self.failure.check()

    @property
    def is_asking(self) -> bool:
        """Whether a request is in flight."""
        return bool(self._requests)

    def leave(self, sample_index: int) -> None:
        """Nothing waits for the end of a session."""

    async def sample(self, turn: TurnRequest) -> Completion:
        if self.failure:
            await asyncio.sleep(0)  # an environment that asks in a loop must not block others
            self.check()
        found = self._log.find(turn.token_ids, sampling=turn.sampling, max_tokens=turn.max_tokens, seed=turn.seed)
        if found is not None:
            self.num_reused += 1
            return found
        loop = asyncio.get_running_loop()
        key = (turn.affinity, turn.sampling, turn.max_tokens, tuple(turn.token_ids))
        waiting = self._gathering.get(key)
        if waiting is None:
            waiting = self._gathering[key] = {}
            # At the end of this turn of the event loop.
            loop.call_soon(self._send, key)
        waiting[turn.seed] = loop.create_future()
        return await waiting[turn.seed]

    async def close(self) -> None:
        """Cancel the requests in flight, which write to the log, and close the log."""
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        self._log.close()

    def _send(self, key: _Key) -> None:
        waiting = self._gathering.pop(key)
        request = asyncio.create_task(self._request(key, waiting))
        # The loop itself holds tasks weakly.
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _request(self, key: _Key, waiting: dict[int, asyncio.Future[Completion]]) -> None:
        affinity, sampling, max_tokens, prompt = key
        token_ids, seeds = list(prompt), list(waiting)
        try:
            request = GenerateRequest(
                token_ids=token_ids,
                seeds=seeds,
                max_tokens=max_tokens,
                stop_token_ids=self._log.header.stop_token_ids,
                weights_digest=self._log.header.weights_digest,
                **msgspec.structs.asdict(sampling),
            )
            choices = await self._client.generate(request, affinity=affinity)
            moved()
            # First: a killed run must find every answer that an environment acted on.
            completions = [_of_seed(choice, seed) for choice, seed in zip(choices, seeds, strict=True)]
            self._log.append(token_ids, sampling=sampling, max_tokens=max_tokens, seeds=seeds, completions=completions)
        except asyncio.CancelledError:
            for future in waiting.values():
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - raised where the turns are awaited
            self.failure.set(error)
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)
            return
        for future, completion in zip(waiting.values(), completions, strict=True):
            if not future.done():
                future.set_result(completion)


def _of_seed(choice: Completion, seed: int) -> Completion:
    """Return what an engine sampled with `seed`, without the index and digests of the engine's answer."""
    spans = [VersionSpan(span.version, span.start, span.end, seed) for span in choice.versions]
    return Completion(choice.token_ids, choice.logprobs, choice.finish_reason, spans)
