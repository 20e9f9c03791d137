"""An environment of two turns whose score is a judge's, for runs with a stand-in for one; imports little."""

from collections.abc import Sequence

from holdfast import Environment, Judge, JudgeConfig, Message, Score, Session, Task, TaskSeed


class Judged(Environment):
    """Two turns, and what the judge makes of both."""

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
