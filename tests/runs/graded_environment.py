"""An environment whose difficulty is an argument."""

from collections.abc import Sequence

from holdfast import Environment, Message, Score, Session, Task, TaskSeed


class Graded(Environment):
    """Reward 1 where the length of the answer can be divided by `modulus`: always at 1, seldom at a large one."""

    def __init__(self, modulus: int = 9, fails_at: int | None = None) -> None:
        self._modulus = modulus
        self._fails_at = fails_at

    def make_task(self, seed: TaskSeed) -> Task:
        if seed.index == self._fails_at:
            raise ValueError("no such task")
        return Task(prompt=[Message("user", f"{seed.index} of {seed.level} by {self._modulus} {seed.number}")])

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(float(len(session.completion) % self._modulus == 0)) for session in sessions]
