"""An environment and a tracker of searched runs. Each run has a copy of this file, `own_letters.py`, to edit."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast import Environment, Message, Score, Session, Task, TaskSeed, TrackedRun, Tracker


class Letters(Environment):
    """Rewards the letters of the task. `turns`: of a session; `fails`: every so many tasks raise an error."""

    def __init__(self, size: int = 4, turns: int = 1, fails: int = 0) -> None:
        self._size, self._turns, self._fails = size, turns, fails

    def make_task(self, seed: TaskSeed) -> Task:
        word = "".join(seed.random().choices("abcdefghij", k=self._size))
        return Task(prompt=[Message("user", word)], answer=word)

    async def run(self, session: Session, task: Task) -> None:
        for turn in range(self._turns):
            if turn:
                session.append_messages([Message("user", "again")])
            await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        if self._fails and sum(map(ord, task.answer)) % self._fails == 0:
            raise ValueError("a task that fails")
        edited = 0.0
        return [Score(edited + len({*task.answer} & {*session.texts[-1]}) / 4) for session in sessions]


class Kept(Tracker):
    """Keeps each run in a file of `$SEARCH_TRACKED`, by its id, as a service does."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        self._file = open(Path(os.environ["SEARCH_TRACKED"]) / f"{run.id}.txt", "a")
        self._file.write(f"begin {run.directory} after {after}\n")
        return after

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(f"step {step} {metrics['loss']}\n")

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        self._file.write(f"{kind} {text}\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
