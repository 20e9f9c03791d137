"""Environments for runs: of two turns, judged, graded, or held in the middle; they import little."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from holdfast import Environment, Judge, JudgeConfig, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.env.reverse_text import ReverseText


class Judged(Environment):
    def __init__(self, judge: JudgeConfig) -> None:
        self._judge = Judge(judge, fields=["first", "second"])

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"{seed.index % 2}")], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([Message("user", "again")])
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        rows = [{"first": session.texts[0], "second": session.texts[1]} for session in sessions]
        judgements = await self._judge.ask_all(rows)
        return [Score(one.score) for one in judgements]


class TwoTurns(Environment):
    """Reverse some letters, and then others; a wrong letter costs."""

    def make_task(self, seed: TaskSeed) -> Task:
        letters = "".join(seed.random().choices("abcdefgh", k=5))
        return Task(prompt=[Message("user", letters)], answer=letters[::-1])

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([Message("user", task.answer)])
        await session.sample()

    def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        answers = (task.answer, task.answer[::-1])
        return [
            Score(sum(_same_letters(*pair) for pair in zip(session.texts, answers, strict=True)) / 10)
            for session in sessions
        ]


def _same_letters(said: str, right: str) -> int:
    return sum(one == other for one, other in zip(said, right, strict=False))


class Crashing(Environment):
    """Tasks 0 and 1 are long; in task 2 some sessions end their process, or lack memory, while the others go on."""

    def __init__(self, *, lacks_memory: bool = False) -> None:
        self._lacks_memory = lacks_memory

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"{seed.number}")], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample(max_tokens=4)
        if task.answer == "2" and session.token_ids[-1] % 2:
            if self._lacks_memory:
                raise MemoryError
            await asyncio.sleep(0.2)
            os._exit(7)
        for _ in range({"0": 9, "1": 9, "2": 40}.get(task.answer, 1)):
            session.append_messages([Message("user", "again")])
            await session.sample(max_tokens=4)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(float(len(session.token_ids))) for session in sessions]


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


async def _hold(home: str, after: int) -> None:
    """Count a group in the file `counted` of a directory; behind the first `after` wait for the file `released`."""
    with open(Path(home) / "counted", "ab") as file:
        file.write(b".")
        count = file.tell()
    while count > after and not (Path(home) / "released").exists():
        await asyncio.sleep(0.01)


class HeldReverse(ReverseText):
    def __init__(self, home: str, after: int) -> None:
        super().__init__()
        self._holds = (home, after)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        await _hold(*self._holds)
        return await super().score(task, sessions)


class HeldJudged(Judged):
    def __init__(self, judge: JudgeConfig, home: str, after: int) -> None:
        super().__init__(judge)
        self._holds = (home, after)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        scores = await super().score(task, sessions)
        await _hold(*self._holds)
        return scores
