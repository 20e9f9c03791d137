"""An environment of two turns whose rewards differ, for runs of the example's model; imports little."""

from collections.abc import Sequence

from holdfast import Environment, Message, Score, Session, Task, TaskSeed


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
