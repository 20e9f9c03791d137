"""Three tasks that a small chat model half knows: add, multiply, and write a sentence as JSON.

Training and evaluations never share a task. Of `Sums` and `Boxes` a fifth of the pairs of numbers is held out, in both
orders; of `ToJson` a quarter of the names and of the cities.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

from holdfast import ConfigError, Environment, Message, Score, Session, Task, TaskSeed

_ONE_IN = 5
"""Pairs of numbers of which one is held out."""
_HALF = 0.5
"""Reward of the right answer with something else around it."""
_KEYS = ("name", "age", "city")
_ONLY_NUMBER = "Answer with the number only."
_THINGS = ("pens", "apples", "books", "coins", "eggs", "stamps", "cards", "keys")
_HOLDERS = (("boxes", "box"), ("bags", "bag"), ("jars", "jar"), ("baskets", "basket"))
_NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor Alice "
    "Bruno Carol Daniel Ella Frank Gina Hugo Ivan Julia Karl Laura Martin Nina Oscar Peter Ruth Simon Tom Vera"
)
_CITIES = (
    "Berlin Paris London Madrid Rome Vienna Oslo Dublin Athens Lisbon Warsaw Prague Boston Chicago Denver Dallas "
    "Seattle Miami Toronto Sydney Tokyo Delhi Cairo Nairobi Lima Bogota Moscow Milan Munich Hamburg Geneva Zurich "
    "Helsinki Stockholm Brussels Budapest Houston Phoenix Detroit Atlanta"
)
_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "My friend {name} from {city} is {age}.",
)


class _Calculation(Environment):
    """Questions from a list, answered by a number.

    Reward: 1 for the number and nothing else, 0.5 for an answer in which the last number is right.
    """

    def __init__(self, questions: Sequence[tuple[str, tuple[int, ...], int]]) -> None:
        """Divide the questions: the text, the numbers in it, and the answer."""
        self._trained = [(text, answer) for text, numbers, answer in questions if not _is_held_out(numbers)]
        self._held_out = [(text, answer) for text, numbers, answer in questions if _is_held_out(numbers)]
        Random(0).shuffle(self._held_out)  # the first of them, which an evaluation may stop after, are of all kinds
        self.num_tasks = len(self._held_out)

    def make_task(self, seed: TaskSeed) -> Task:
        """Return a question of training, or the next that is held out."""
        if seed.held_out:
            text, answer = self._held_out[seed.index % len(self._held_out)]
        else:
            text, answer = seed.random().choice(self._trained)
        return Task(prompt=[Message("user", f"{text} {_ONLY_NUMBER}")], answer=str(answer))

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself; `right` is whether its last number is right, whatever stands around it."""
        return [_score_of_number(session.completion.strip(), task.answer) for session in sessions]

    def wrong_answers(self, task: Task, random: Random) -> list[str]:
        """Return what is not to be said: the right number in words, and another number."""
        others = [number for number in range(int(task.answer) - 3, int(task.answer) + 4) if number >= 0]
        others.remove(int(task.answer))
        return [f"The answer is {task.answer}.", str(random.choice(others))]


class Sums(_Calculation):
    """`What is 7 + 5? Answer with the number only.`"""

    def __init__(self, terms: int = 2, largest: int = 9) -> None:
        """Make the questions.

        Args:
            terms: numbers of a sum, 2 or 3.
            largest: of these numbers.

        Raises:
            ConfigError: there are too few sums to hold some out, or too many.
        """
        if terms not in (2, 3) or not 5 <= largest <= 50:
            raise ConfigError(
                f"sums: terms = {terms}, largest = {largest}; allowed are 2 or 3 terms and 5 <= largest <= 50"
            )
        numbers = itertools.product(range(largest + 1), repeat=terms)
        super().__init__([(f"What is {' + '.join(map(str, some))}?", some, sum(some)) for some in numbers])


class Boxes(_Calculation):
    """`There are 3 boxes. Each box holds 4 pens. How many pens are there? Answer with the number only.`"""

    def __init__(self) -> None:
        """Make the questions."""
        super().__init__(
            [
                (
                    f"There are {one} {holders}. Each {holder} holds {other} {things}. How many {things} are there?",
                    (one, other),
                    one * other,
                )
                for one, other in itertools.product(range(2, 10), repeat=2)
                for things in _THINGS
                for holders, holder in _HOLDERS
            ]
        )


class ToJson(Environment):
    """`Mia is 34 years old and lives in Oslo.` as `{"name": "Mia", "age": 34, "city": "Oslo"}`.

    Reward: 1 for this object and nothing else, with any white space. Where something stands around it, or values are
    wrong: half the share of right values.
    """

    def make_task(self, seed: TaskSeed) -> Task:
        """Return a sentence about somebody, of whom training and evaluations know different ones."""
        random = seed.random()
        name, city = (random.choice(_part(words, held_out=seed.held_out)) for words in (_NAMES, _CITIES))
        person = {"name": name, "age": random.randint(18, 80), "city": city}
        sentence = random.choice(_SENTENCES).format(**person)
        keys = ", ".join(f'"{key}"' for key in _KEYS)
        prompt = f"Write this as JSON with the keys {keys}. Answer with the JSON only.\n{sentence}"
        return Task(prompt=[Message("user", prompt)], answer=json.dumps(person))

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself; `right` is the share of right values of the object in it."""
        return [_score_of_object(session.completion.strip(), json.loads(task.answer)) for session in sessions]

    def wrong_answers(self, task: Task, random: Random) -> list[str]:
        """Return what is not to be said: the right object with words around it, and one with a wrong value."""
        person = json.loads(task.answer)
        key = random.choice(_KEYS)
        others = {"name": _part(_NAMES, held_out=False), "city": _part(_CITIES, held_out=False), "age": range(18, 81)}
        wrong = random.choice([value for value in others[key] if value != person[key]])
        return [f"Here is the JSON:\n```json\n{task.answer}\n```", json.dumps(person | {key: wrong})]


def _score_of_number(text: str, answer: str) -> Score:
    is_right = re.findall(r"-?[0-9]+", text)[-1:] == [answer]
    is_exact = text == answer
    return Score(1.0 if is_exact else _HALF * is_right, {"exact": float(is_exact), "right": float(is_right)})


def _score_of_object(text: str, person: dict[str, Any]) -> Score:
    is_exact = _pairs(text) == _pairs(json.dumps(person))
    found = dict(_pairs(text[text.find("{") : text.rfind("}") + 1]))
    right = sum(found.get(key) == json.dumps(value) for key, value in person.items()) / len(person)
    return Score(1.0 if is_exact else _HALF * right, {"exact": float(is_exact), "right": right})


def _pairs(text: str) -> list[tuple[str, str]]:
    """Return the keys of a JSON object with their values, as JSON, in order; of anything else nothing."""
    try:
        parsed = json.loads(text, object_pairs_hook=_Pairs)
        return sorted((key, json.dumps(value)) for key, value in parsed) if isinstance(parsed, _Pairs) else []
    except (ValueError, RecursionError):
        return []


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON, in which a key may stand twice; a list of JSON is a plain list."""


def _is_held_out(numbers: Sequence[int]) -> bool:
    """Whether only evaluations ask about these numbers, in whatever order."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % _ONE_IN == 0


def _part(words: str, *, held_out: bool) -> list[str]:
    """Return every fourth word, or the others."""
    return [word for position, word in enumerate(words.split()) if (position % 4 == 3) == held_out]
