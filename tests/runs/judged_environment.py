"""An environment of two turns whose score is a judge's, for runs with a stand-in for one; imports little."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from holdfast import Environment, Judge, JudgeConfig, Message, Score, Session, Task, TaskSeed


class Judged(Environment):
    """Two turns, and what the judge makes of both.

    Args:
        dies: a file; a process that scores when there is none makes it, asks the judge, and is killed.
    """

    def __init__(self, judge: JudgeConfig, dies: str = "") -> None:
        self._judge = Judge(judge, fields=["first", "second"])
        self._dies = Path(dies) if dies else None

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"{seed.index % 2}")], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([Message("user", "again")])
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        rows = [{"first": session.texts[0], "second": session.texts[1]} for session in sessions]
        judgements = await self._judge.ask_all(rows)
        if self._dies is not None and not self._dies.exists():
            self._dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [Score(one.score) for one in judgements]
