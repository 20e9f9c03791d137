"""Add two numbers. Endless; how many digits, with or without carries, and more digits as the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from holdfast import ConfigError, Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.env.jsonl import lcs

_MOST_DIGITS = 4000
"""Python refuses to read longer numbers (`sys.set_int_max_str_digits`)."""


class Addition(Environment):
    """Reward: the share of right digits, from the last one on; with `working`, how much of it is as it should be."""

    def __init__(
        self,
        min_digits: int = 1,
        max_digits: int = 3,
        carries: bool = True,
        working: bool = False,
        grow_every: int | None = None,
        prompt: str = "{first}+{second}=",
    ) -> None:
        """Check the arguments.

        Args:
            min_digits: fewest digits of both numbers.
            max_digits: most digits of both numbers.
            carries: whether digits may add up to ten and more; False: none do.
            working: the answer goes digit by digit from the right, with the carry, and ends with the sum:
                `8+7=15 5+6+1=12 125` for 58+67.
            grow_every: tasks after which `max_digits` comes one digit nearer; the first have `min_digits`. Unset:
                every task has up to `max_digits`.
            prompt: the user's message, with {first} and {second} in it.

        Raises:
            ConfigError: they do not fit together.
        """
        if not 1 <= min_digits <= max_digits <= _MOST_DIGITS:
            raise ConfigError(
                f"addition: min_digits = {min_digits}, max_digits = {max_digits}; "
                f"allowed is 1 <= min_digits <= max_digits <= {_MOST_DIGITS}"
            )
        if grow_every is not None and grow_every < 1:
            raise ConfigError(f"addition: grow_every = {grow_every}; allowed are whole numbers from 1 on")
        if grow_every is not None and min_digits == max_digits:
            raise ConfigError(
                f"addition: grow_every = {grow_every} has nothing to grow: min_digits and max_digits are {max_digits}"
            )
        self._min_digits = min_digits
        self._max_digits = max_digits
        self._carries = carries
        self._working = working
        self._grow_every = grow_every
        self._prompt = prompt

    def make_task(self, seed: TaskSeed) -> Task:
        """Return two numbers of equally many digits with their sum, written as `working` says, as the answer."""
        random = seed.random()
        digits = random.randint(self._min_digits, self._most_digits(seed.index))
        first, second = _numbers(random, digits, carries=self._carries)
        answer = working_of(first, second) if self._working else str(first + second)
        prompt = self._prompt.replace("{first}", str(first)).replace("{second}", str(second))
        return Task(prompt=[Message("user", prompt)], answer=answer)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself; `exact` is whether the sum, its last word, is right."""
        return [self._score(session.completion.strip(), task.answer) for session in sessions]

    def _most_digits(self, index: int) -> int:
        if self._grow_every is None:
            return self._max_digits
        return min(self._max_digits, self._min_digits + index // self._grow_every)

    def _score(self, text: str, answer: str) -> Score:
        if not self._working:
            return Score(right_digits(text, answer), {"exact": float(text == answer)})
        is_right = text.split()[-1:] == answer.split()[-1:]
        return Score(lcs(text, answer), {"exact": float(is_right), "working": float(text == answer)})


def right_digits(text: str, answer: str) -> float:
    """Return the share of characters that are the same, counted from the end, of the longer text."""
    right = sum(given == wanted for given, wanted in zip(reversed(text), reversed(answer), strict=False))
    return right / max(len(text), len(answer), 1)


def working_of(first: int, second: int) -> str:
    """Return the sum of every column from the right, with the carry where there is one, and then the whole sum."""
    columns = []
    carry = 0
    for one, other in zip(reversed(str(first)), reversed(str(second)), strict=True):
        terms = f"{one}+{other}+1" if carry else f"{one}+{other}"
        total = int(one) + int(other) + carry
        columns.append(f"{terms}={total}")
        carry = total // 10
    return " ".join([*columns, str(first + second)])


def _numbers(random: Random, digits: int, *, carries: bool) -> tuple[int, int]:
    """Return two numbers of exactly `digits` digits; one digit may be 0, longer numbers begin with none."""
    first = second = ""
    for place in range(digits):
        lowest = int(place == 0 and digits > 1)
        one = random.randint(lowest, 9 if carries else 9 - lowest)
        other = random.randint(lowest, 9 if carries else 9 - one)
        first += str(one)
        second += str(other)
    return int(first), int(second)
