"""Environments that stand still in the middle of their work until they may go on; they import little."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from holdfast import JudgeConfig, Score, Session, Task
from holdfast.orchestrator.env.reverse_text import ReverseText
from tests.runs.judged_environment import Judged


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
    """Two turns that a judge scores."""

    def __init__(self, judge: JudgeConfig, home: str, after: int) -> None:
        super().__init__(judge)
        self._holds = (home, after)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        scores = await super().score(task, sessions)
        await _hold(*self._holds)
        return scores
