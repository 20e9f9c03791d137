"""What an environment is: tasks from seeds, sessions that only grow, scores for a whole group.

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
    """What a rollout earned.

    Attributes:
        reward: any finite number, also of NumPy or torch.
        metrics: further numbers of this rollout; their means go to the metrics of the step.
        turn_rewards: one for each sampled turn, beside `reward`.
        token_rewards: one for each sampled token, instead of `turn_rewards`.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = None
    token_rewards: Sequence[float] | None = None


class Environment:
    """Base of all environments. Constructor arguments come from `environments.args` of the config.

    Attributes:
        tools: functions or methods that the policy may call, with a docstring and annotations, sync or `async`. A
            parameter annotated with `Session` gets the session.
        num_tasks: how many different tasks there are, such as rows of a file; None: every seed may give another.
    """

    tools: Sequence[Callable[..., Any]] = ()
    num_tasks: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Give every call of `make_task` a fresh seed, so that calling it again gives the same task."""
        super().__init_subclass__(**options)
        if "make_task" in vars(cls):
            cls.make_task = _with_fresh_seed(cls.make_task)

    def make_task(self, seed: TaskSeed) -> Task:
        """Return the task that `seed` names: a pure function, so that any task can be made again."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_task(seed)")

    async def run(self, session: Session, task: Task) -> None:
        """Play one session of `task`, which has its prompt already.

        By default: one sampled turn, or with `tools` further turns as long as they call one, at most `max_turns`.
        """
        await session.sample()
        while session.has_tools and await session.answer_tool_calls():
            await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return one score per session; all sessions of one group come together, so they can be compared."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(task, sessions)")


def _with_fresh_seed(make_task: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_task)
    def make(self: Environment, seed: TaskSeed) -> Any:
        return make_task(self, seed.fresh())

    return make
