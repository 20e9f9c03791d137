"""An environment that costs nothing, so that what is measured is the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast import Environment, Score, Session, Task, TaskSeed


class Nothing(Environment):
    """A different short prompt per task; the reward alternates within a group."""

    def make_task(self, seed: TaskSeed) -> Task:
        """Return a task of a few tokens."""
        return Task(prompt=f"{seed.index} " + "".join(seed.random().choices("abcdefgh", k=16)))

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score without looking."""
        return [Score(float(index % 2)) for index in range(len(sessions))]
