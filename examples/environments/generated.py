"""Tasks of the generators of reasoning-gym (https://github.com/open-thought/reasoning-gym).

Needs `uv sync --inexact --extra reasoning-gym` and a C compiler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast import ConfigError, Environment, Message, Score, Session, Task, TaskSeed
from holdfast.process.imports import import_extra


@dataclass(frozen=True)
class GeneratedTask(Task):
    """A task with the entry of the generator, which its scorer reads."""

    entry: Mapping[str, Any] = field(default_factory=dict)


class ReasoningGym(Environment):
    """Reward: what the generator's own scorer gives, from 0 to 1, for the text in the last <answer>, or for all."""

    def __init__(
        self, generator: str, settings: Mapping[str, Any] | None = None, system_prompt: str | None = None
    ) -> None:
        """Make the generator.

        Args:
            generator: its name, such as `spell_backward`.
            settings: of the generator, except `seed` and `size`.
            system_prompt: a message before each question.

        Raises:
            ConfigError: reasoning-gym is not installed, has no such generator, or refuses the settings.
        """
        library = import_extra("reasoning_gym", extra="reasoning-gym", needed_by=f"the generator {generator}")
        self._system_prompt = system_prompt
        self._extract = library.utils.extract_answer
        self._make = partial(library.create_dataset, generator, size=1, **(settings or {}))
        try:
            self._scorer = self._make(seed=0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"reasoning-gym refuses {generator} with {settings}: {error}") from None

    def make_task(self, seed: TaskSeed) -> GeneratedTask:
        """Return the only entry of the generator that the seed's number seeds."""
        # A data set for each task: some make all entries at once, or allow no index beyond their size.
        entry = self._make(seed=seed_of(seed))[0]
        messages = [Message("user", entry["question"])]
        if self._system_prompt is not None:
            messages.insert(0, Message("system", self._system_prompt))
        answer = entry["answer"]  # some have none, but many right ones
        return GeneratedTask(prompt=messages, answer="" if answer is None else str(answer), entry=entry)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself, in a thread: some scorers compute for a while."""
        assert isinstance(task, GeneratedTask)
        return [await asyncio.to_thread(self._score, session.completion, task.entry) for session in sessions]

    def _score(self, completion: str, entry: Mapping[str, Any]) -> Score:
        answer = self._extract(completion)
        try:
            reward = float(self._scorer.score_answer(completion.strip() if answer is None else answer, entry=entry))
        except Exception:  # noqa: BLE001 - of the library's scorers, some of which fail on odd answers
            return Score(0.0, {"exact": 0.0, "unreadable": 1.0})
        return Score(reward, {"exact": float(reward == 1.0), "unreadable": 0.0})


def seed_of(seed: TaskSeed) -> int:
    """Return 32 bits, as NumPy takes no more, from which some generators draw; held-out seeds keep their highest."""
    return (seed.number >> 63) << 31 | seed.number % 2**31
