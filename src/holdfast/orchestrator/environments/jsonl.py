"""Prompts and right answers from a JSON-lines file, with a choice of scorers."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.orchestrator.environments.interface import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.environments.math_answers import MathAnswers
from holdfast.orchestrator.environments.scorers import SCORERS, regex_scorer
from holdfast.orchestrator.environments.session import as_messages
from holdfast.shared.chat.template import ChatMessage
from holdfast.shared.errors import ConfigError, DataError, nearest
from holdfast.shared.user_functions import load_function


class Jsonl(Environment):
    """Single-turn questions; every row is used once per epoch, in a new order each time."""

    def __init__(
        self,
        path: Path,
        prompt: str = "prompt",
        answer: str = "answer",
        scorer: str = "exact",
        pattern: str | None = None,
        shuffle: bool = True,
    ) -> None:
        """Read the whole file.

        Args:
            path: the file, one JSON object per line.
            prompt: column of the question: text, or a list of {role, content}.
            answer: column of the right answer: text or a number.
            scorer: `exact`, `contains`, `lcs`, `number`, `regex`, `math_verify`, or `module:function` for one of your
                own, from completion and right answer to a number.
            pattern: with `regex`: what to find; the last match (its first group) is compared.
            shuffle: a new order every epoch, from the run's seed; off: file order.
        """
        self._score = _find_scorer(scorer, pattern)
        self._scorer_name = scorer.partition(":")[2] or scorer
        self._tasks = _read_tasks(path, prompt=prompt, answer=answer)
        self.num_tasks = len(self._tasks)
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._make_order)

    def make_task(self, seed: TaskSeed) -> Task:
        """Return row `index` of the endless sequence of epochs."""
        epoch, position = divmod(seed.index, len(self._tasks))
        if not self._shuffle:
            return self._tasks[position]
        return self._tasks[self._order(seed.shared("epoch", epoch))[position]]

    def _make_order(self, seed: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(seed).shuffle(order)
        return order

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself."""
        rewards = [await _number(self._score(session.completion, task.answer)) for session in sessions]
        return [Score(reward, {self._scorer_name: reward}) for reward in rewards]


def _find_scorer(name: str, pattern: str | None) -> Callable[[str, str], Any]:
    allowed = [*SCORERS, "regex", "math_verify"]
    if name not in allowed and ":" not in name:
        raise ConfigError(
            f"jsonl: there is no scorer '{name}'.{nearest(name, allowed)} Allowed: {', '.join(allowed)}, "
            "or 'module:function' for one of your own."
        )
    if (pattern is not None) != (name == "regex"):
        raise ConfigError(f"jsonl: `pattern` belongs to scorer 'regex'; got scorer '{name}' and pattern {pattern!r}")
    if name == "math_verify":
        return MathAnswers()
    if ":" in name:
        return _users_scorer(name)
    if pattern is None:
        return SCORERS[name]
    try:
        return regex_scorer(pattern)
    except re.error as error:
        raise ConfigError(f"jsonl: pattern {pattern!r} is not a regular expression: {error}") from None


def _users_scorer(name: str) -> Callable[[str, str], Any]:
    scorer = load_function(name, key="jsonl: scorer")
    try:
        inspect.signature(scorer).bind("completion", "answer")
    except TypeError as error:
        raise ConfigError(
            f"jsonl: scorer '{name}' cannot be called with a completion and the right answer: {error}"
        ) from None
    return scorer


async def _number(reward: Any) -> float:
    """Return what a scorer gave, awaited if it is `async`; what it must be is checked with the score."""
    return await reward if inspect.isawaitable(reward) else reward


def _read_tasks(path: Path, *, prompt: str, answer: str) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"jsonl: {path.absolute()} is not UTF-8: {error}") from None
    except OSError as error:
        there = sorted(entry.name for entry in path.parent.glob("*.jsonl")) if path.parent.is_dir() else []
        beside = f" {path.parent} has: {', '.join(there)}." if there else ""
        raise DataError(
            f"jsonl: {path.absolute()} cannot be read ({error.strerror}).{nearest(path.name, there)}{beside}"
        ) from None
    tasks = [
        _read_task(line, where=f"{path}:{number}", prompt=prompt, answer=answer)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not tasks:
        raise DataError(f"jsonl: {path} has no rows")
    return tasks


def _read_task(line: str, *, where: str, prompt: str, answer: str) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is {type(row).__name__}, expected an object with '{prompt}' and '{answer}'")
    for argument, column in (("prompt", prompt), ("answer", answer)):
        if column not in row:
            raise DataError(
                f"{where} has no column '{column}'.{nearest(column, row)} Columns there: {', '.join(row) or 'none'}. "
                f"Name the right one with the argument `{argument}`."
            )
    for column in ("tools", "documents", "chat_template_kwargs"):
        if row.get(column) and column not in (prompt, answer):
            raise DataError(
                f"{where} has `{column}`, which prompts of rl do not take, so they would not be those of sft. Write "
                "what the policy must see into the messages, and remove the column."
            )
    right = row[answer]
    if isinstance(right, bool) or not isinstance(right, str | int | float):
        raise DataError(f"{where}: '{answer}' is {_shown(right)}, expected text or a number")
    return Task(prompt=_messages(row[prompt], f"{where}: '{prompt}'"), answer=str(right))


def _messages(value: Any, where: str) -> Sequence[Message | ChatMessage]:
    if isinstance(value, str):
        return (Message("user", value),)
    try:
        messages = tuple(as_messages(value))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is {_shown(value)}, expected text or a list of {{role, content}} ({error})") from None
    if not messages:
        raise DataError(f"{where} is an empty list of messages")
    return messages


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:80]}"
