"""What a policy can have sampled: ids that it has, log-probabilities that are some. Nothing else is ever trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from holdfast.shared.errors import DataError
from holdfast.shared.wire.rollouts import Batch

# Above 0 by no more than the rounding of a log-softmax in float32.
_HIGHEST_LOGPROB = 1e-4


def vocab_size_in(path: Path) -> int:
    """Return how many token ids the model with this config.json has.

    Raises:
        DataError: it does not say.
    """
    try:
        config = json.loads(path.read_bytes())
        sizes = [section["vocab_size"] for section in (config, *_sections(config)) if "vocab_size" in section]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not sizes or not isinstance(sizes[0], int):
        raise DataError(f"{path} has no vocab_size: it cannot be told which token ids the model has")
    return sizes[0]


def _sections(config: dict[str, object]) -> list[dict[str, object]]:
    """Return the sections of models that are made of several, the one for text first."""
    return [section for key in ("text_config", "llm_config") if isinstance(section := config.get(key), dict)]


def problem_of_ids(token_ids: Sequence[int], vocab_size: int | None) -> str | None:
    """Return which of the ids no model has, or one of `vocab_size` tokens has not; or None."""
    if token_ids and min(token_ids) < 0:
        return f"token_ids holds {min(token_ids)}, allowed are 0 and above"
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        return f"token_ids holds {max(token_ids)}, the model has {vocab_size} tokens"
    return None


def problem_of_logprobs(field: str, logprobs: Sequence[float], *, least: float = -math.inf) -> str | None:
    """Return which of the log-probabilities cannot be one, or None."""
    if not logprobs or (
        math.isfinite(sum(logprobs)) and least <= min(logprobs) and max(logprobs) <= _HIGHEST_LOGPROB
    ):  # without a step of the interpreter for each
        return None
    for logprob in logprobs:
        if not math.isfinite(logprob) or not least <= logprob <= _HIGHEST_LOGPROB:
            lower = "finite numbers" if least == -math.inf else f"numbers from {least:g}"
            return f"{field} holds {logprob:g}, allowed are {lower} up to 0"
    return None


def problem_of_batch(batch: Batch, vocab_size: int | None) -> str | None:
    """Return what of a batch nobody can have sampled, or None: a version that checked less may have journaled it.

    Args:
        vocab_size: how many token ids the model has; None where that is not known.
    """
    for rollout in batch.rollouts:
        problem = (
            problem_of_ids(rollout.token_ids, vocab_size)
            or problem_of_logprobs("logprobs", rollout.logprobs)
            or problem_of_logprobs("reference_logprobs", rollout.reference_logprobs or [])
        )
        if problem is not None:
            return f"{rollout.environment}, task {rollout.task_id}: {problem}"
    return None
