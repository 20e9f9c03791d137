"""One problem, a group of rollouts: play the sessions, score them together."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.concurrency import run_all
from orchestrator.environment import Completion, Environment, Score, Session, SessionFull, Task
from orchestrator.sampler import Sampler
from orchestrator.seeds import TaskSeed, request_seed
from orchestrator.tokenizer import Tokenizer
from triad.config.orchestrator import OrchestratorConfig
from triad.errors import DataError, EnvironmentFailure, TriadError
from triad.messages import Rollout, VersionSpan

_log = logging.getLogger("orchestrator")


@dataclass(frozen=True)
class Problem:
    """One problem of a batch; its group is sampled by the engine of index `engine`."""

    name: str
    environment: Environment
    seed: TaskSeed
    engine: int


async def run_group(
    problem: Problem, step: int, *, config: OrchestratorConfig, tokenizer: Tokenizer, sampler: Sampler
) -> list[Rollout]:
    """Return `group_size` scored rollouts of `problem` for batch `step`.

    Raises:
        EnvironmentFailure: the environment raised or broke its contract.
        DataError: the prompt leaves no room within `seq_len`.
        InferenceError: an engine failed.
    """
    with _blaming(problem, "make_task"):
        task = problem.environment.make_task(problem.seed)
    prompt_ids = _prompt_ids(task, problem, tokenizer=tokenizer, seq_len=config.seq_len)
    sessions = [
        _new_session(prompt_ids, index, problem, step, config=config, tokenizer=tokenizer, sampler=sampler)
        for index in range(config.group_size)
    ]
    await run_all(_play(session, task, problem) for session in sessions)
    with _blaming(problem, "score"):
        scores = await problem.environment.score(task, sessions)
    _check_scores(scores, problem, config.group_size)
    return [
        Rollout(
            environment=problem.name,
            task_id=problem.seed.index,
            sample_index=index,
            token_ids=session.token_ids,
            loss_mask=session.loss_mask,
            logprobs=session.logprobs,
            versions=_merged(session.versions),
            reward=float(score.reward),
            truncated=session.truncated,
            metrics={name: float(value) for name, value in score.metrics.items()},
        )
        for index, (session, score) in enumerate(zip(sessions, scores, strict=True))
    ]


def _prompt_ids(task: Task, problem: Problem, *, tokenizer: Tokenizer, seq_len: int) -> list[int]:
    token_ids = tokenizer.encode(task.prompt) if isinstance(task.prompt, str) else tokenizer.prompt(task.prompt)
    if not 1 <= len(token_ids) < seq_len:
        raise DataError(
            f"environment '{problem.name}', task {problem.seed.index}: the prompt has {len(token_ids)} tokens; allowed "
            f"are 1 to {seq_len - 1}, so that one sampled token fits into seq_len = {seq_len}. "
            "Raise seq_len or shorten the prompts."
        )
    return token_ids


def _new_session(
    prompt_ids: list[int],
    sample_index: int,
    problem: Problem,
    step: int,
    *,
    config: OrchestratorConfig,
    tokenizer: Tokenizer,
    sampler: Sampler,
) -> Session:
    async def sample_turn(token_ids: list[int], turn: int, max_tokens: int) -> Completion:
        seed = request_seed(problem.seed, step=step, sample_index=sample_index, turn=turn)
        return await sampler.sample(token_ids, max_tokens=max_tokens, seed=seed, engine=problem.engine)

    return Session(
        prompt_ids,
        tokenizer=tokenizer,
        sample_turn=sample_turn,
        seq_len=config.seq_len,
        max_tokens=config.sampling.max_tokens,
    )


async def _play(session: Session, task: Task, problem: Problem) -> None:
    with _blaming(problem, "run"):
        try:
            await problem.environment.run(session, task)
        except SessionFull:
            session.truncated = True
    if not session.texts:
        raise EnvironmentFailure(f"{_named(problem)}: run() ended without a sampled turn; call session.sample()")


@contextmanager
def _blaming(problem: Problem, method: str) -> Iterator[None]:
    """Turn what an environment raises into an EnvironmentFailure that says where it came from."""
    try:
        yield
    except (TriadError, SessionFull):
        raise
    except Exception as error:
        _log.error("%s: %s() raised", _named(problem), method, exc_info=error)
        raise EnvironmentFailure(
            f"{_named(problem)}: {method}() raised {type(error).__name__}: {error} ({_origin(error)})"
        ) from error


def _named(problem: Problem) -> str:
    return f"environment '{problem.name}' failed on task {problem.seed.index} (seed {problem.seed.number})"


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _check_scores(scores: Sequence[Score], problem: Problem, group_size: int) -> None:
    if len(scores) != group_size:
        raise EnvironmentFailure(f"{_named(problem)}: score() returned {len(scores)} scores for {group_size} sessions")
    for score in scores:
        if not isinstance(score, Score):
            raise EnvironmentFailure(f"{_named(problem)}: score() must return Score objects, got {score!r}")
        for name, value in (("reward", score.reward), *score.metrics.items()):
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise EnvironmentFailure(
                    f"{_named(problem)}: score() gave {name} = {value!r}, expected a finite number"
                )


def _merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Join neighbouring spans of one version."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = VersionSpan(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return merged
