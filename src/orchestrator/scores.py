"""What environments hand over, tasks, messages and scores, checked and converted before anything relies on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.environment import Score, Task, as_messages, as_text
from triad.chat.tokenizer import Tokenizer
from triad.errors import DataError, EnvironmentFailure

_LARGEST = 1e30
"""Sums and squares of such numbers are still finite."""


def prompt_ids_of(task: Any, tokenizer: Tokenizer, *, what: str) -> list[int]:
    """Return the token ids of a task's prompt.

    Raises:
        EnvironmentFailure: it is no `Task`, or its prompt is neither text nor messages, or the template refuses it.
    """
    if not isinstance(task, Task):
        raise EnvironmentFailure(f"{what}: make_task() must return a Task, got {_shown(task)}")
    try:
        if isinstance(task.prompt, str):
            return tokenizer.text_prompt(as_text(task.prompt))
        return tokenizer.prompt(as_messages(task.prompt))
    except (TypeError, ValueError, DataError) as error:
        raise EnvironmentFailure(f"{what}: the prompt of its task: {error}") from None


def checked_scores(scores: Any, group_size: int, *, what: str) -> list[Score]:
    """Return one score per session, with plain numbers in it.

    Raises:
        EnvironmentFailure: it is not that; says what it is.
    """
    if isinstance(scores, str | bytes | Mapping) or not isinstance(scores, Sequence):
        raise EnvironmentFailure(
            f"{what}: score() must return a list of {group_size} Score objects, got {_shown(scores)}"
        )
    if len(scores) != group_size:
        raise EnvironmentFailure(f"{what}: score() returned {len(scores)} scores for {group_size} sessions")
    return [_checked(score, what) for score in scores]


def _checked(score: Any, what: str) -> Score:
    if not isinstance(score, Score):
        raise EnvironmentFailure(f"{what}: score() must return Score objects, got {_shown(score)}")
    if not isinstance(score.metrics, Mapping):
        raise EnvironmentFailure(f"{what}: score() gave metrics = {_shown(score.metrics)}, expected names with numbers")
    metrics: dict[str, float] = {}
    for name, value in score.metrics.items():
        try:
            metrics[as_text(name)] = _number(value, f"{name}", what)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"{what}: score() gave a metric the name {_shown(name)}: {error}") from None
    return Score(_number(score.reward, "reward", what), metrics)


def _number(value: Any, name: str, what: str) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    is_scalar = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    try:
        number = float(value) if is_scalar else math.nan
    except (ArithmeticError, TypeError, ValueError, RuntimeError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise EnvironmentFailure(
            f"{what}: score() gave {name} = {_shown(value)}, expected a finite number, at most {_LARGEST:g} in size"
        )
    return number


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        text = "a number"
    text = text if len(text) <= 80 else f"{text[:80]} …"
    return f"{text.encode('utf-8', 'backslashreplace').decode()} ({type(value).__name__})"
