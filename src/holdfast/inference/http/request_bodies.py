"""Bodies of requests to the project's routes, and decoding them: what cannot be right is refused with 400."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from holdfast.inference.request_error import RequestError
from holdfast.shared.files.run_owner import Owner

_MAX_CHOICES = 4096

_Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]

_T = TypeVar("_T", bound=msgspec.Struct)


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/generate`.

    Attributes:
        token_ids: the prompt.
        seeds: one independent choice is sampled per seed, by a generator of its own.
        max_tokens: most tokens per choice, the stop token included.
        temperature: softmax temperature, 0.01 to 2; 0 picks the likeliest token, with
            logprobs at temperature 1 and of all tokens.
        top_p: of the likeliest tokens the fewest whose probabilities sum to this; 1: all.
        top_k: the k likeliest tokens; 0: all.
        min_p: tokens at least this times as likely as the likeliest; 0: all.
        stop_token_ids: a choice ends after sampling one of these; nothing else stops it.
        prompt_logprobs: also give the log-probabilities of the prompt, for checks.
        weights_digest: of the weights that the request is for: others refuse it with 409 and the code
            `other_weights`. None: whichever serve.
    """

    token_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    seeds: Annotated[list[_Seed], msgspec.Meta(min_length=1, max_length=_MAX_CHOICES)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: float = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    stop_token_ids: list[_TokenId] = []
    prompt_logprobs: bool = False
    weights_digest: str | None = None


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /update_weights`.

    Attributes:
        path: a directory that the engine's machine can read.
        version: of the weights in it.
        owner: the run whose weights these are, which then owns the server; None: nobody's, and the server must be.
    """

    path: str
    version: _Version
    owner: Owner | None = None


def decode_request(body: bytes) -> GenerateRequest:
    """Return the generate request in `body`.

    Raises:
        RequestError: 400, naming the unknown fields or the first wrong value.
    """
    try:
        return decode_body(body, GenerateRequest)
    except RequestError:
        known = GenerateRequest.__struct_fields__
        try:
            unknown = sorted(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(known))
        except (ValueError, RecursionError):  # the first error says more
            unknown = []
        if unknown:
            shown = ", ".join(unknown)
            raise RequestError(400, f"unknown fields: {shown:.500}. Allowed: {', '.join(known)}.") from None
        raise


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Return the `kind` in `body`.

    Raises:
        RequestError: 400, naming the first wrong value.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, str(error)) from None
    except (ValueError, RecursionError) as error:  # broken text, too
        raise RequestError(400, f"the body is not JSON: {error}") from None
