"""Whether tasks can be solved: what their own right answers earn, and what answers without content earn."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import EnvironmentFailure, shown
from holdfast.orchestrator.env.interface import Environment, Score, Session, Task
from holdfast.orchestrator.env.jsonl import Jsonl, answers_of
from holdfast.orchestrator.env.numbers import read_numbers

NUM_DRAWS = 200
"""Tasks of an environment without an end that are tried."""
_WITHOUT_CONTENT = ("", "I do not know.")

Make = Callable[[int], Awaitable[Task]]
PlayAndScore = Callable[[Task, list[str], int], Awaitable[list[float]]]
"""(task, completions, its index) -> rewards."""


@dataclass
class Solvability:
    """The result of `try_answers`.

    Attributes:
        what: `rows` of a file, or `tasks`.
        num_tasks: how many there are, or are tried; `num_tried` of them were, before the time was over.
        unsolved, free: how many tasks the own answer does not solve, and an answer without content solves.
        first: texts about the first of each.
        is_known: a right answer earned something; otherwise completions may need a form that answers do not have.
    """

    what: str
    num_tasks: int
    num_tried: int = 0
    unsolved: int = 0
    free: int = 0
    first: dict[str, str] = field(default_factory=dict)
    is_known: bool = True

    def lines(self) -> list[str]:
        """Return a line for each kind of fault."""
        if not self.is_known:
            return []
        of = f"of {self.num_tried:,} {self.what}"
        lines = []
        if self.unsolved:
            lines.append(
                f"{self.unsolved:,} {of} cannot be solved: their own right answer earns less than the full reward. "
                f"First: {self.first['unsolved']}"
            )
        if self.free:
            lines.append(
                f"{self.free:,} {of} give the full reward to an empty or arbitrary completion. "
                f"First: {self.first['free']}"
            )
        return lines


async def try_answers(environment: Environment, make: Make, score: PlayAndScore, *, most_s: float) -> Solvability:
    """Score each task's own answers, and completions without content, as whole completions.

    Args:
        make, score: make, play and score tasks; raise EnvironmentFailure.
        most_s: begin no task after so many seconds.
    """
    is_file = isinstance(environment, Jsonl)
    num_tasks = environment.num_tasks or NUM_DRAWS
    found = Solvability("rows" if is_file else "tasks", num_tasks)
    tried: list[tuple[str, float, float]] = []
    until = time.monotonic() + most_s
    for index in range(num_tasks):
        if time.monotonic() > until:
            break
        where, own, without = environment.places[index] if is_file else f"task {index}", 0.0, 0.0
        try:
            task = await make(index)
            answers = answers_of(task)
            where = f"{where}, {shown(answers[0])}"
            if is_file and environment.scorer_name == "number" and not read_numbers(answers[0]):
                where += ", which has no number"
            rewards = await score(task, [*answers, *_WITHOUT_CONTENT], index)
            own, without = max(rewards[: len(answers)]), max(rewards[len(answers) :])
        except EnvironmentFailure as failure:
            where = f"{where}: {failure}"
        found.num_tried += 1
        tried.append((where, own, without))
    best = max((own for _, own, _ in tried), default=0.0)
    full = (environment.full_reward if is_file else None) or best
    found.is_known = full > 0
    for where, own, without in tried:
        if own < full:
            found.unsolved += 1
            found.first.setdefault("unsolved", where)
        if without >= full:
            found.free += 1
            found.first.setdefault("free", where)
    return found


def rows_of(environment: Jsonl) -> Make:
    """Return what makes the tasks in the order of the file."""

    async def make(index: int) -> Task:
        return environment.tasks[index]

    return make


async def warnings_of(environment: Environment, settings: EnvironmentConfig, *, most_s: float) -> list[str]:
    """Return what to say of a built-in environment at the start. Judges and players of others are not asked."""
    if not isinstance(environment, Jsonl) or environment.full_reward is None:
        return []

    async def score(task: Task, completions: list[str], _: int) -> list[float]:
        sessions = [cast("Session", SimpleNamespace(completion=one, texts=[one])) for one in completions]
        scores: list[Score] = await environment.score(task, sessions)
        return [one.reward for one in scores]

    found = await try_answers(environment, rows_of(environment), score, most_s=most_s)
    tried = ""
    if found.num_tried < found.num_tasks:
        tried = f" (The file has {found.num_tasks:,} rows; `environments check` tries all of them.)"
    return [f"WARNING: environment '{settings.label}': {line}{tried}" for line in found.lines()]
