"""Find a number in several turns; after every guess the policy is told whether it is higher or lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import ConfigError, Environment, Message, Score, Session, SessionFull, Task, TaskSeed

_LARGEST = 10**9
_FORM_SHARE = 0.1
"""Most that guesses are worth for being numbers within the bounds; finding the number is always worth more."""


@dataclass(frozen=True)
class Secret(Task):
    """A task with the number to be found."""

    number: int = 0


class GuessNumber(Environment):
    """Reward: 1 for the number at the first guess, less with every further one; see `score`."""

    def __init__(self, low: int = 1, high: int = 15, turns: int = 4, prompt: str = "guess {low}-{high}") -> None:
        """Check the arguments.

        Args:
            low: the smallest number that it may be, not negative.
            high: the largest.
            turns: most guesses.
            prompt: the user's first message, with {low} and {high} in it.

        Raises:
            ConfigError: they do not fit together.
        """
        if not 0 <= low < high <= _LARGEST:
            raise ConfigError(f"guess_number: low = {low}, high = {high}; allowed is 0 <= low < high <= {_LARGEST}")
        if turns < 1:
            raise ConfigError(f"guess_number: turns = {turns}; allowed are whole numbers from 1 on")
        self._low = low
        self._high = high
        self._turns = turns
        self._prompt = prompt

    def make_task(self, seed: TaskSeed) -> Secret:
        """Return a number between the bounds, both of them included."""
        number = seed.random().randint(self._low, self._high)
        prompt = self._prompt.replace("{low}", str(self._low)).replace("{high}", str(self._high))
        return Secret(prompt=[Message("user", prompt)], answer=str(number), number=number)

    async def run(self, session: Session, task: Task) -> None:
        """Let the policy guess, and say `higher`, `lower` or `a number from LOW to HIGH`."""
        assert isinstance(task, Secret)
        for turn in range(1, self._turns + 1):
            guess = self._read(await session.sample())
            if guess == task.number or turn == self._turns:
                return
            try:
                session.append_messages([Message("user", self._hint(guess, task.number))])
            except SessionFull:  # no room for another guess: those before count
                return

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Return 0.1 + 0.9 times the share of turns that are left, the winning one included, where it was found.

        Otherwise 0.1 times the share of guesses that were numbers within the bounds.
        """
        assert isinstance(task, Secret)
        return [self._score(session.texts, task.number) for session in sessions]

    def _score(self, texts: Sequence[str], number: int) -> Score:
        guesses = [self._read(text) for text in texts]
        valid = sum(guess is not None for guess in guesses) / max(len(guesses), 1)
        found = number in guesses
        left = (self._turns - guesses.index(number)) / self._turns if found else 0.0
        reward = _FORM_SHARE + (1 - _FORM_SHARE) * left if found else _FORM_SHARE * valid
        return Score(reward, {"exact": float(found), "valid": valid, "guesses": float(len(guesses))})

    def _read(self, text: str) -> int | None:
        """Return the guess, None where it is no number within the bounds."""
        text = text.strip()
        # The length first: Python refuses to read numbers of thousands of digits.
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_LARGEST))):
            return None
        return int(text) if self._low <= int(text) <= self._high else None

    def _hint(self, guess: int | None, number: int) -> str:
        if guess is None:
            return f"a number from {self._low} to {self._high}"
        return "higher" if guess < number else "lower"
