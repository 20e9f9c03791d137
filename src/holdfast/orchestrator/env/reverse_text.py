"""Reverse a string of lowercase letters. Endless, and learnable by a tiny model in seconds."""

import string
from collections.abc import Sequence

from holdfast.errors import ConfigError
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.env.jsonl import lcs


class ReverseText(Environment):
    """Reward: longest common subsequence with the reversed text, as a share of the longer of the two."""

    def __init__(self, min_length: int = 4, max_length: int = 12) -> None:
        if not 1 <= min_length <= max_length:
            raise ConfigError(
                f"reverse_text: min_length = {min_length}, max_length = {max_length}; "
                "allowed is 1 <= min_length <= max_length"
            )
        self._min_length = min_length
        self._max_length = max_length

    def make_task(self, seed: TaskSeed) -> Task:
        """Return a random text with its reversal as the answer."""
        random = seed.random()
        length = random.randint(self._min_length, self._max_length)
        text = "".join(random.choices(string.ascii_lowercase, k=length))
        return Task(prompt=[Message("user", text)], answer=text[::-1])

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself."""
        completions = [session.completion.strip() for session in sessions]
        return [Score(lcs(text, task.answer), {"exact": float(text == task.answer)}) for text in completions]
