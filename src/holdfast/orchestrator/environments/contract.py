"""What environments hand over, tasks, messages and scores, checked and converted before anything relies on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.orchestrator.environments.interface import Score, Session, Task
from holdfast.orchestrator.environments.session import as_messages, as_text, num_characters
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.errors import DataError, EnvironmentFailure
from holdfast.shared.printable import shown
from holdfast.shared.wire.arrays import Logprobs, LossMask, Rewards, TokenIds
from holdfast.shared.wire.rollouts import StepRewards

_MOST_METRICS = 1000
_LONGEST_NAME = 200
_LARGEST = 1e30
"""Sums and squares of such numbers are still finite."""


_GROWTH = "Sessions grow by sample(), append_messages() and append_text() alone"


class PromptTooLong(DataError):
    """A prompt leaves no room for a sampled token."""


def prompt_ids_of(
    task: Any, tokenizer: Tokenizer, *, what: str, room: int, tools: Sequence[Any] | None = None
) -> list[int]:
    """Return the token ids of a task's prompt, with the schemas of the tools that the policy may call.

    Raises:
        PromptTooLong: its text alone says that it has more than `room` tokens.
        EnvironmentFailure: it is no `Task`, or its prompt is neither text nor messages, or the template refuses it.
    """
    if not isinstance(task, Task):
        raise EnvironmentFailure(f"{what}: make_task() must return a Task, got {_shown(task)}")
    try:
        prompt = as_text(task.prompt) if isinstance(task.prompt, str) else as_messages(task.prompt)
        characters = len(prompt) if isinstance(prompt, str) else num_characters(prompt)
        if tokenizer.is_too_long(characters, room=room):
            raise PromptTooLong(
                f"{what}: the prompt has {characters} characters, more than {room} tokens can stand for. "
                "Raise seq_len or shorten the prompts."
            )
        if isinstance(prompt, str):
            if tools:
                raise TypeError(
                    "an environment with tools needs messages, in which the chat template shows them; got text"
                )
            return tokenizer.text_prompt(prompt)
        return tokenizer.prompt(prompt, tools=tools)
    except PromptTooLong:
        raise
    except (TypeError, ValueError, DataError) as error:
        raise EnvironmentFailure(f"{what}: the prompt of its task: {error}") from None


def checked_scores(scores: Any, sessions: Sequence[Session], *, what: str) -> list[Score]:
    """Return one score per session, with plain numbers in it.

    Raises:
        EnvironmentFailure: it is not that; says what it is.
    """
    if isinstance(scores, str | bytes | Mapping) or not isinstance(scores, Sequence):
        raise EnvironmentFailure(
            f"{what}: score() must return a list of {len(sessions)} Score objects, got {_shown(scores)}"
        )
    if len(scores) != len(sessions):
        raise EnvironmentFailure(f"{what}: score() returned {len(scores)} scores for {len(sessions)} sessions")
    return [_checked(score, session, what) for score, session in zip(scores, sessions, strict=True)]


def step_rewards(score: Score, session: Session) -> StepRewards | None:
    """Return what a checked score says about turns or tokens, each at its last token; None where it says nothing."""
    if score.turn_rewards is not None:
        return StepRewards(TokenIds([end - 1 for end in session.turn_ends]), Rewards(score.turn_rewards))
    if score.token_rewards is not None:
        places = [place for place, sampled in enumerate(session.loss_mask) if sampled]
        return StepRewards(TokenIds(places), Rewards(score.token_rewards))
    return None


def _checked(score: Any, session: Session, what: str) -> Score:
    if not isinstance(score, Score):
        raise EnvironmentFailure(f"{what}: score() must return Score objects, got {_shown(score)}")
    if not isinstance(score.metrics, Mapping):
        raise EnvironmentFailure(f"{what}: score() gave metrics = {_shown(score.metrics)}, expected names with numbers")
    if len(score.metrics) > _MOST_METRICS:
        raise EnvironmentFailure(f"{what}: score() gave {len(score.metrics)} metrics, allowed are {_MOST_METRICS}")
    metrics: dict[str, float] = {}
    for name, value in score.metrics.items():
        try:
            if len(as_text(name)) > _LONGEST_NAME:
                raise ValueError(f"it has {len(name)} characters, allowed are {_LONGEST_NAME}")
            metrics[name] = _number(value, f"{name}", what)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"{what}: score() gave a metric the name {_shown(name)}: {error}") from None
    if score.turn_rewards is not None and score.token_rewards is not None:
        raise EnvironmentFailure(f"{what}: score() gave turn_rewards and token_rewards; give one of them")
    return Score(
        _number(score.reward, "reward", what),
        metrics,
        _numbers(score.turn_rewards, "turn_rewards", f"{len(session.texts)} sampled turns", len(session.texts), what),
        _numbers(
            score.token_rewards,
            "token_rewards",
            f"{session.loss_mask.num_sampled} sampled tokens",
            session.loss_mask.num_sampled,
            what,
        ),
    )


def _numbers(values: Any, name: str, counted: str, length: int, what: str) -> list[float] | None:
    """Return as many plain numbers as there are turns or tokens; None for None."""
    if values is None:
        return None
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise EnvironmentFailure(f"{what}: score() gave {name} = {_shown(values)}, expected a list of numbers")
    numbers = [_number(value, f"{name}[{place}]", what) for place, value in enumerate(values)]
    if len(numbers) != length:
        raise EnvironmentFailure(f"{what}: score() gave {len(numbers)} {name} for {counted}")
    return numbers


def _number(value: Any, name: str, what: str) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    is_scalar = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    try:
        number = float(value) if is_scalar else math.nan
    except Exception:  # noqa: BLE001 - of whichever class of others it is; what it is gets refused below
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise EnvironmentFailure(
            f"{what}: score() gave {name} = {_shown(value)}, expected a finite number, at most {_LARGEST:g} in size"
        )
    return number


def _shown(value: Any) -> str:
    return f"{shown(value)} ({type(value).__name__})"


def require_sound(session: Session, *, what: str) -> None:
    """Refuse a session whose fields the environment changed to what no sampling gives; it is only to read them.

    Raises:
        EnvironmentFailure: says which field.
    """
    kinds = {
        "token_ids": TokenIds, "loss_mask": LossMask, "logprobs": Logprobs, "versions": list, "texts": list,
        "truncated": bool,
    }  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(found := getattr(session, name, None), kind):
            raise EnvironmentFailure(f"{what}: run() or score() replaced session.{name} by {_shown(found)}. {_GROWTH}")
    if changed := session.changed():
        raise EnvironmentFailure(
            f"{what}: run() or score() changed session.{changed[0]} to what was never sampled. {_GROWTH}"
        )
