"""What an environment is: tasks from seeds, sessions with the policy, scores for a whole group.

Minimal environment:

    class Shout(Environment):
        def make_task(self, seed: TaskSeed) -> Task:
            word = seed.random().choice(["yes", "no"])
            return Task(prompt=[Message("user", word)], answer=word.upper())

        async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
            return [Score(float(session.completion == task.answer)) for session in sessions]

Several turns: override `run`, and take turns between `sample` and `append_messages`. Tools that the policy may call:
set `tools`. `make_task` and `score` may be `async` or not; a message may be written as
`{"role": "user", "content": "..."}` too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.chat.messages import Message
from holdfast.orchestrator.env.session import Session, SessionFull, Task
from holdfast.orchestrator.state import TaskSeed

__all__ = ["Environment", "Message", "Score", "Session", "SessionFull", "Task", "TaskSeed"]


@dataclass(frozen=True)
class Score:
    """The reward of one rollout.

    Attributes:
        reward: any finite number; scalars of NumPy and torch count as numbers.
        metrics: other numbers of this rollout. Their means go to the metrics of the step.
        turn_rewards: a reward for each sampled turn, in addition to `reward`.
        token_rewards: a reward for each sampled token, in addition to `reward`. Give this or `turn_rewards`.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = None
    token_rewards: Sequence[float] | None = None


class Environment:
    """Base class of all environments. The setting `environments.args` gives the constructor's arguments.

    Attributes:
        tools: functions that the policy may call. Each has a docstring and annotations, and is sync or `async`. The
            body of the class may list its own methods. A parameter annotated with `Session` gets the session.
        num_tasks: the number of different tasks if it is finite, such as the rows of a file. None: each seed may give
            a new task.
    """

    tools: Sequence[Callable[..., Any]] = ()
    num_tasks: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Give every `make_task` a seed whose generator is new, so that calling it again gives the same task."""
        super().__init_subclass__(**options)
        if "make_task" in vars(cls):
            cls.make_task = _with_fresh_seed(cls.make_task)

    def make_task(self, seed: TaskSeed) -> Task:
        """Return the task for `seed`. It must depend on `seed` only, so that any task can be made again."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_task(seed)")

    async def run(self, session: Session, task: Task) -> None:
        """Play one session of `task`. The session already has the task's prompt.

        The default samples one turn. With `tools` it samples more turns until a turn has no calls, at most `max_turns`.
        """
        await session.sample()
        while session.has_tools and await session.answer_tool_calls():
            await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return one score for each session. It gets all sessions of one group, so it can compare them."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(task, sessions)")


def _with_fresh_seed(make_task: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_task)
    def make(self: Environment, seed: TaskSeed) -> Any:
        return make_task(self, seed.fresh())

    return make
