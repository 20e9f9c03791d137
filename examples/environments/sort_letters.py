"""Sort the letters of a word. Endless; the length says how hard it is."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from holdfast import ConfigError, Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.env.jsonl import lcs

_LETTERS = string.ascii_lowercase


class SortLetters(Environment):
    """Reward: longest common subsequence with the sorted letters, as a share of the longer of the two."""

    def __init__(
        self, min_length: int = 4, max_length: int = 10, prompt: str = "{letters}", distinct: bool = False
    ) -> None:
        """Check the arguments.

        Args:
            min_length: fewest letters of a word.
            max_length: most letters of a word.
            prompt: the user's message, with {letters} in it.
            distinct: no letter stands twice in a word.

        Raises:
            ConfigError: they do not fit together.
        """
        if not 1 <= min_length <= max_length:
            raise ConfigError(
                f"sort_letters: min_length = {min_length}, max_length = {max_length}; "
                "allowed is 1 <= min_length <= max_length"
            )
        if distinct and max_length > len(_LETTERS):
            raise ConfigError(
                f"sort_letters: max_length = {max_length} with distinct = true; there are {len(_LETTERS)} letters"
            )
        self._min_length = min_length
        self._max_length = max_length
        self._prompt = prompt
        self._draw = random.Random.sample if distinct else random.Random.choices

    def make_task(self, seed: TaskSeed) -> Task:
        """Return random letters with their sorted sequence as the answer."""
        draw = seed.random()
        letters = "".join(self._draw(draw, _LETTERS, k=draw.randint(self._min_length, self._max_length)))
        prompt = self._prompt.replace("{letters}", letters)
        return Task(prompt=[Message("user", prompt)], answer="".join(sorted(letters)))

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself."""
        completions = [session.completion.strip() for session in sessions]
        return [Score(lcs(text, task.answer), {"exact": float(text == task.answer)}) for text in completions]
