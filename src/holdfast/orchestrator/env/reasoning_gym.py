"""The generators of reasoning-gym as environments: `id = "reasoning_gym:leg_counting"`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.errors import ConfigError, nearest
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.process.imports import import_extra

PREFIX = "reasoning_gym:"
_OURS = ("system_prompt",)
_NOT_SET = ("seed", "size")
"""Settings of every generator that are not to choose: tasks come from the run's seed, and never end."""


def _seed_of(number: int) -> int:  # untested: needs reasoning-gym
    """Return 32 bits, as NumPy takes no more, which some generators draw from; held-out numbers keep their highest."""
    return (number >> 63) << 31 | number % 2**31


@dataclass(frozen=True)
class GeneratedTask(Task):
    """A task with the entry of the generator, which its scorer reads."""

    entry: Mapping[str, Any] = field(default_factory=dict)


class ReasoningGym(Environment):  # untested: needs reasoning-gym
    """Reward: what the generator's own scorer gives, from 0 to 1, for the text in the last <answer>, or for all."""

    def __init__(self, generator: str, settings: dict[str, Any]) -> None:
        """Make the generator; `settings` are its own, and `system_prompt`, a message before each question.

        Raises ConfigError if reasoning-gym is not installed, has no such generator, or refuses the settings.
        """
        library = import_extra("reasoning_gym", extra="reasoning-gym", needed_by=f"environment '{PREFIX}{generator}'")
        factory = library.factory
        if generator not in factory.DATASETS:
            raise ConfigError(
                f"there is no environment '{PREFIX}{generator}'.{nearest(generator, factory.DATASETS)} reasoning-gym "
                f"has: {', '.join(sorted(factory.DATASETS))}"
            )
        own = {name: value for name, value in settings.items() if name not in _OURS}
        allowed = [one.name for one in dataclasses.fields(factory.DATASETS[generator][1]) if one.name not in _NOT_SET]
        for name in own:
            if name not in allowed:
                raise ConfigError(
                    f"{PREFIX}{generator} has no argument '{name}'.{nearest(name, [*allowed, *_OURS])} "
                    f"Allowed: {', '.join([*allowed, *_OURS])}."
                )
        self._system_prompt = settings.get("system_prompt")
        if not isinstance(self._system_prompt, str | None):
            raise ConfigError(f"{PREFIX}{generator}: system_prompt = {self._system_prompt!r}; expected text")
        self._make = partial(library.create_dataset, generator, size=1, **own)
        try:
            self._scorer = self._make(seed=0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"{PREFIX}{generator} refuses {own}: {error or type(error).__name__}") from None
        self._extract = library.utils.extract_answer

    def make_task(self, seed: TaskSeed) -> GeneratedTask:
        """Return the only entry of the generator that the seed's number seeds."""
        # One for each task: some make all their entries at once, or allow no index beyond their size.
        entry = self._make(seed=_seed_of(seed.number))[0]
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
        if answer is None:
            answer = completion.strip()
        try:
            reward = float(self._scorer.score_answer(answer=answer, entry=entry))
        except Exception:  # noqa: BLE001 - of others' code, which fails on answers that it does not expect
            return Score(0.0, {"exact": 0.0, "unreadable": 1.0})
        return Score(reward, {"exact": float(reward == 1.0), "unreadable": 0.0})
