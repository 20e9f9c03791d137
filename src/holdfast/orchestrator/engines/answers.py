"""What an engine may answer: numbers that a policy can have sampled, and nothing else is ever trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.orchestrator.engines.http import Unavailable
from holdfast.shared.errors import ConfigError, InferenceError
from holdfast.shared.wire.inference_api import Choice, Completion, GenerateRequest, GenerateResponse
from holdfast.shared.wire.sampled_checks import problem_of_ids, problem_of_logprobs, vocab_size_in

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
    return vocab_size_in(path)


def check_choices(
    response: GenerateResponse, request: GenerateRequest, *, url: str, vocab_size: int | None
) -> list[Choice]:
    """Return the choices of an answer in the order of the seeds: one whole choice for each, of numbers that can be.

    Args:
        vocab_size: how many token ids the model has; None where that is not known.

    Raises:
        InferenceError: naming the field, the value and what is allowed.
        Unavailable: the server aborted the request.
    """
    choices = sorted(response.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(len(request.seeds))):
        found = str([choice.index for choice in choices])
        raise InferenceError(f"{url} answered {len(request.seeds)} seeds with the choices {found:.200}")
    for choice in choices:
        if choice.finish_reason == "abort":
            raise Unavailable("the server aborted a generation request")
        problem = problem_of(
            choice, max_tokens=request.max_tokens, stop_token_ids=request.stop_token_ids, vocab_size=vocab_size
        ) or problem_of_logprobs("prompt_logprobs", choice.prompt_logprobs or [])
        if problem is not None:
            raise InferenceError(
                f"{url} gave an answer that no engine can have sampled: {problem}. Nothing of it is kept. Is this the "
                "inference server of this version of holdfast, and do its model and memory hold?"
            )
    newest = {span.version for choice in choices for span in choice.versions}
    if newest and response.version != max(newest):
        raise InferenceError(
            f"{url} says that version {response.version} answered, and its choices are of version {max(newest)}"
        )
    return choices


def problem_of(
    completion: Completion, *, max_tokens: int, stop_token_ids: Sequence[int], vocab_size: int | None
) -> str | None:
    """Return why no engine can have sampled a continuation, or None.

    Args:
        max_tokens: most that were asked for.
        stop_token_ids: what ends it.
        vocab_size: how many token ids the model has; None where that is not known.
    """
    return (
        _problem_of_counts(completion, max_tokens)
        or problem_of_ids(completion.token_ids, vocab_size)
        or problem_of_logprobs("logprobs", completion.logprobs, least=_LOWEST_SAMPLED_LOGPROB)
        or _problem_of_spans(completion)
        or _problem_of_end(completion, max_tokens, stop_token_ids)
    )


def _problem_of_counts(completion: Completion, max_tokens: int) -> str | None:
    count = len(completion.token_ids)
    if 1 <= count <= max_tokens and len(completion.logprobs) == count:
        return None
    return (
        f"it has {count} token ids with {len(completion.logprobs)} logprobs; expected equally many, from 1 to "
        f"max_tokens = {max_tokens}"
    )


def _problem_of_spans(choice: Completion) -> str | None:
    covered = 0
    for span in choice.versions:
        if not covered <= span.start < span.end <= len(choice.token_ids) or span.version < 0:
            return (
                f"versions holds {{version: {span.version}, start: {span.start}, end: {span.end}}} for "
                f"{len(choice.token_ids)} tokens; allowed are versions from 0, and spans inside and in order"
            )
        covered = span.end
    if sum(span.end - span.start for span in choice.versions) != len(choice.token_ids):
        return (
            f"versions says of some of the {len(choice.token_ids)} sampled tokens which policy version made them; "
            "every token needs one"
        )
    return None


def _problem_of_end(choice: Completion, max_tokens: int, stop_token_ids: Sequence[int]) -> str | None:
    reason, count = choice.finish_reason, len(choice.token_ids)
    if reason not in _FINISH_REASONS:
        return f"finish_reason is {reason!r:.80}, allowed are {' and '.join(_FINISH_REASONS)}"
    stops = [place for place, token_id in enumerate(choice.token_ids) if token_id in stop_token_ids]
    if reason == "stop" and stops != [count - 1]:
        return f"finish_reason is 'stop' and its stop tokens are at {stops}, allowed is {count - 1} alone, the last"
    if reason == "length" and (stops or count != max_tokens):
        return f"finish_reason is 'length' after {count} tokens of at most {max_tokens}, with stop tokens at {stops}"
    return None
