"""What an engine may answer: numbers that a policy can have sampled, and nothing else is ever trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from orchestrator.protocol import Choice, GenerateRequest
from triad.errors import ConfigError, DataError, InferenceError

# Above 0 by no more than the rounding of a log-softmax in float32.
_HIGHEST_LOGPROB = 1e-4
# No token this unlikely is ever sampled: the smallest positive float32 is exp(-103.3).
_LOWEST_SAMPLED_LOGPROB = -1000.0
_FINISH_REASONS = ("stop", "length")


def load_vocab_size(name: str) -> int:
    """Return how many token ids the model in a local directory, or on the hub, has.

    Raises:
        ConfigError: there is no such model.
        DataError: its config.json does not say.
    """
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HFValidationError

        try:
            path = Path(hf_hub_download(name, "config.json"))
        except (HFValidationError, OSError) as error:
            raise ConfigError(f"model.name: '{name}' is no directory and no model on the hub: {error}") from None
    try:
        config = json.loads(path.read_bytes())
        sizes = [section["vocab_size"] for section in (config, *_sections(config)) if "vocab_size" in section]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not sizes or not isinstance(sizes[0], int):
        raise DataError(f"{path} has no vocab_size: it cannot be told which token ids the model has")
    return sizes[0]


def _sections(config: dict[str, object]) -> list[dict[str, object]]:
    """Return the sections of models that are made of several, the one for text first."""
    return [section for key in ("text_config", "llm_config") if isinstance(section := config.get(key), dict)]


def check_choice(choice: Choice, request: GenerateRequest, *, url: str, vocab_size: int | None) -> None:
    """Refuse a continuation that no engine can have sampled for `request`.

    Args:
        vocab_size: how many token ids the model has; None where that is not known.

    Raises:
        InferenceError: naming the field, the value and what is allowed.
    """
    problem = (
        _problem_of_ids(choice.token_ids, vocab_size)
        or _problem_of_logprobs("logprobs", choice.logprobs, least=_LOWEST_SAMPLED_LOGPROB)
        or _problem_of_logprobs("prompt_logprobs", choice.prompt_logprobs or [], least=-math.inf)
        or _problem_of_spans(choice)
        or _problem_of_end(choice, request)
    )
    if problem is not None:
        raise InferenceError(
            f"{url} gave an answer that no engine can have sampled: {problem}. Nothing of it is kept. Is this the "
            "inference server of this version of triad, and do its model and memory hold?"
        )


def _problem_of_ids(token_ids: Sequence[int], vocab_size: int | None) -> str | None:
    if token_ids and min(token_ids) < 0:
        return f"token_ids holds {min(token_ids)}, allowed are 0 and above"
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        return f"token_ids holds {max(token_ids)}, the model has {vocab_size} tokens"
    return None


def _problem_of_logprobs(field: str, logprobs: Sequence[float], *, least: float) -> str | None:
    for logprob in logprobs:
        if not math.isfinite(logprob) or not least <= logprob <= _HIGHEST_LOGPROB:
            lower = "finite numbers" if least == -math.inf else f"numbers from {least:g}"
            return f"{field} holds {logprob:g}, allowed are {lower} up to 0"
    return None


def _problem_of_spans(choice: Choice) -> str | None:
    covered = 0
    for span in choice.versions:
        if not covered <= span.start < span.end <= len(choice.token_ids) or span.version < 0:
            return (
                f"versions holds {{version: {span.version}, start: {span.start}, end: {span.end}}} for "
                f"{len(choice.token_ids)} tokens; allowed are versions from 0, and spans inside and in order"
            )
        covered = span.end
    return None


def _problem_of_end(choice: Choice, request: GenerateRequest) -> str | None:
    reason, count = choice.finish_reason, len(choice.token_ids)
    if reason not in _FINISH_REASONS:
        return f"finish_reason is '{reason}', allowed are {' and '.join(_FINISH_REASONS)}"
    stops = [place for place, token_id in enumerate(choice.token_ids) if token_id in request.stop_token_ids]
    if reason == "stop" and stops != [count - 1]:
        return f"finish_reason is 'stop' and its stop tokens are at {stops}, allowed is {count - 1} alone, the last"
    if reason == "length" and (stops or count != request.max_tokens):
        return (
            f"finish_reason is 'length' after {count} tokens of at most {request.max_tokens}, with stop tokens at "
            f"{stops}"
        )
    return None
