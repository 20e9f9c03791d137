"""The HTTP API of the inference server: routes, headers, bodies, answers, error codes and limits, for both sides.

The server (`holdfast.inference`) and its callers (`holdfast.orchestrator.client`, the launcher) take the API only from
this file. Bodies and answers are JSON. The types bound each body, and the server refuses anything else. Callers decode
an answer with the same types, and then check it as input from outside: see `holdfast.orchestrator.client.http`.

A digest proves that an engine read the right bytes. `ParityPrompt` proves that it computes the right thing from them:
it finds another architecture detail, a stale cache or a wrong dtype.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from holdfast.errors import ConfigError
from holdfast.protocol.rollouts import Logprobs, TokenIds, VersionSpan
from holdfast.protocol.transfer import Transfer

GENERATE_ROUTE = "/inference/v1/generate"
HEALTH_ROUTE = "/health"
WEIGHTS_ROUTE = "/weights"
UPDATE_ROUTE = "/update_weights"
CLAIM_ROUTE = "/claim"
RELEASE_ROUTE = "/release"
MODELS_ROUTE = "/v1/models"
"""vLLM's own: a `ModelList`."""

OWNER_HEADER = "x-holdfast-run"
"""Header of any request with a run's id: a heartbeat of the run that owns the server."""

VERSION_HEADER = "x-policy-version"
"""Header of every answer: the policy version that made it."""

ErrorCode = Literal["owned", "other_weights", "unreadable", "torn"]
"""Errors that a program can react to.

    owned           409: the server is another run's
    other_weights   409: the request is for other weights than the served weights
    unreadable      507: the storage failed to read the weights of a push; they may be whole
    torn            503: a transfer of weights broke off; nothing is sampled before the next push
"""
OWNED: ErrorCode = "owned"
OTHER_WEIGHTS: ErrorCode = "other_weights"
UNREADABLE: ErrorCode = "unreadable"
TORN: ErrorCode = "torn"

MAX_CHOICES = 4096
"""Most seeds of one request."""

# Size of a request: seeds, tools, a grammar, several prompts; and for every token.
_REQUEST_BYTES = 4 << 20
_REQUEST_TOKEN_BYTES = 64
# Size of an answer: around the choices, around the tokens of a choice, and for every token, many times over.
_ANSWER_BYTES = 1 << 16
_CHOICE_BYTES = 4096
_SAMPLED_TOKEN_BYTES = 512
_PROMPT_TOKEN_BYTES = 64

_Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that owns servers, or wants to. Body of `POST /claim` and `POST /release`. `directory`: `host:path` of its
    directory, for people."""

    run_id: str
    directory: str


class OwnerStatus(msgspec.Struct, frozen=True):
    """The owner as `GET /weights` shows it.

    Attributes:
        silent_s: seconds since its last heartbeat.
        lease_s: after this silence the run no longer owns the server; None: it does as long as the server lives.
    """

    run_id: str
    directory: str
    silent_s: float
    lease_s: float | None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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
        stop_token_ids: a choice ends after sampling such a token.
        stop: texts; a choice ends after the token that completes such a text within the choice, special tokens
            included. Nothing else stops it.
        prompt_logprobs: also give the log-probabilities of the prompt, for checks.
        weights_digest: of the weights that the request is for: a server with others refuses it with 409 and
            `other_weights`. None: any; runs always name them.
    """

    token_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    seeds: Annotated[list[_Seed], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: float = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    stop_token_ids: list[_TokenId] = []
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    prompt_logprobs: bool = False
    weights_digest: str | None = None


class Completion(msgspec.Struct):
    """The tokens that an engine sampled in one turn.

    Attributes:
        token_ids: the sampled ids, with the stop token or the tokens of the stop text.
        logprobs: their log-probabilities in the distribution from which they were sampled.
        finish_reason: `stop`, `length` or `abort`.
        versions: the policy version of each span. Positions count from the first sampled token.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str
    versions: list[VersionSpan]


class SampledSpan(VersionSpan, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens [start, end) of a choice were sampled by the weights of `version` with this digest."""

    digest: str


class Choice(Completion):
    """One sampled continuation of an answer.

    Attributes:
        index: of its seed.
        prompt_logprobs: if asked for, of every prompt token except the first, at temperature 1 and over all tokens.
    """

    versions: list[SampledSpan]  # pyright: ignore[reportIncompatibleVariableOverride] - nobody adds spans to an answer
    index: int
    prompt_logprobs: list[float] | None = None


class GenerateResponse(msgspec.Struct):
    """Answer of `POST /inference/v1/generate`.

    Attributes:
        choices: one per seed.
        version: the newest that sampled any of it.
        boot_id: of the server; it changes when the server restarts.
    """

    choices: list[Choice]
    version: int
    boot_id: str


class ServedWeights(msgspec.Struct):
    """Answer of `GET /weights`, and of `POST /claim` and `POST /release`: what a server serves, and to whom.

    Attributes:
        version: None before the first weights.
        digest: `holdfast.run.weights` of the bytes that the engine loaded.
        model: its name; see `same_model`.
        uid: of the user who runs the server.
        boot_id: of the server; it changes when the server restarts.
        owner: the run that it serves; None: any.
        num_workers: processes that take part in a transfer of weights.
    """

    version: int | None
    digest: str | None
    model: str
    uid: int
    boot_id: str
    owner: OwnerStatus | None
    num_workers: int = 1


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /update_weights`.

    Attributes:
        path: a directory that the engine's machine can read.
        version: of the weights in it.
        owner: the run of the weights, which then owns the server; None: only for a server without an owner.
        transfer: take the weights from there, and not from `path`.
    """

    path: str
    version: _Version
    owner: Owner | None = None
    transfer: Transfer | None = None


class UpdateResponse(msgspec.Struct):
    """Answer of `POST /update_weights`: what now serves, and how long the update took."""

    version: int
    digest: str
    seconds: float


class HealthStatus(msgspec.Struct):
    """Answer of `GET /health`.

    Attributes:
        status: `ok` with 200, `failing` with 503.
        weights: the policy version that serves; None before the first.
        reason: why it fails.
    """

    status: Literal["ok", "failing"]
    weights: int | None
    reason: str | None


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An answer that is an error: the reason for people, and one of `ErrorCode`, empty without one."""

    error: str = ""
    code: str = ""


class ModelCard(msgspec.Struct):
    """One model of `GET /v1/models`."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]


def largest_request(max_len: int) -> int:
    """Return how many bytes a request to a model for `max_len` tokens may have."""
    return _REQUEST_BYTES + _REQUEST_TOKEN_BYTES * max_len


def largest_answer(request: GenerateRequest) -> int:
    """Return how many bytes the answer to `request` can have at most, even if each token has a span of its own."""
    per_choice = _CHOICE_BYTES + _SAMPLED_TOKEN_BYTES * request.max_tokens
    if request.prompt_logprobs:
        per_choice += _PROMPT_TOKEN_BYTES * len(request.token_ids)
    return _ANSWER_BYTES + len(request.seeds) * per_choice


def same_model(served: str, wanted: str) -> bool:
    """Whether two names of models are equal, or paths of one directory."""
    try:
        return served == wanted or Path(served).samefile(wanted)
    except (OSError, ValueError):  # a directory is missing, or a name is not a path
        return False


PARITY_PROMPT_NAME = "parity_prompt.json"
TEXT = "One two three four five six seven eight nine ten. The quick brown fox jumps over the lazy dog."
MAX_TOKENS = 32


class ParityPrompt(msgspec.Struct):
    """The trainer's log-probabilities of the parity prompt.

    Attributes:
        token_ids: the text, at most `MAX_TOKENS` tokens.
        logprobs: of every token except the first given those before it, in nats, at temperature 1.
        allowed_nats: mean absolute difference that counts as rounding; None: any.
    """

    token_ids: list[int]
    logprobs: list[float]
    allowed_nats: float | None

    def head(self, num_tokens: int) -> ParityPrompt:
        """Return the parity prompt of the first tokens only, for engines that take no more."""
        return ParityPrompt(self.token_ids[:num_tokens], self.logprobs[: max(0, num_tokens - 1)], self.allowed_nats)


def deviation(parity_prompt: ParityPrompt, logprobs: Sequence[float]) -> float:
    """Return the mean absolute difference of an engine's `logprobs`, in nats. Infinite if their number differs; 0 for a
    single token."""
    if len(logprobs) != len(parity_prompt.logprobs):
        return float("inf")
    differences = [abs(ours - theirs) for ours, theirs in zip(parity_prompt.logprobs, logprobs, strict=True)]
    return sum(differences) / max(1, len(differences))


def read_key(name: str, *, what: str = "key") -> str | None:
    """Return the key in the environment variable `name`; None if unset or empty. `what`: it is called in the message.
    Raise ConfigError, without the key, if a header cannot hold it."""
    key = os.environ.get(name, "")
    if not key:
        return None
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"the {what} in the environment variable {name} holds spaces, line breaks or characters beyond ASCII, "
            f"which no header can hold. A file that ends with a line break gives one: use {name}=$(cat FILE)."
        )
    return key


def read_admin_token(name: str) -> str | None:
    """Return the token in the environment variable `name`; None if unset or empty. Raise ConfigError, without the
    token, if a header cannot hold it."""
    return read_key(name, what="admin token")


class ChatReply(msgspec.Struct, frozen=True):
    """The one choice of a chat completion: its text, which may be empty, and why it ended."""

    text: str
    finish_reason: str
