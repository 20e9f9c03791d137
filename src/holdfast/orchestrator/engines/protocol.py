"""What orchestrator and inference servers say to each other, as JSON."""

from __future__ import annotations

import msgspec

from holdfast.orchestrator.environments.interface import Completion
from holdfast.shared.files.run_owner import Owner
from holdfast.shared.wire.serving import SampledSpan


class GenerateRequest(msgspec.Struct):
    """Body of `POST /inference/v1/generate`: one choice is sampled per seed.

    Attributes:
        weights_digest: of the weights that must sample it.
    """

    token_ids: list[int]
    seeds: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    weights_digest: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    prompt_logprobs: bool = False


class Choice(Completion):
    """One sampled continuation; `index` counts the seeds."""

    versions: list[SampledSpan]  # pyright: ignore[reportIncompatibleVariableOverride] - nobody adds spans to an answer
    index: int = 0
    prompt_logprobs: list[float] | None = None


class GenerateResponse(msgspec.Struct):
    """Answer of `POST /inference/v1/generate`."""

    choices: list[Choice]
    version: int
    boot_id: str


class ServedWeights(msgspec.Struct):
    """Answer of `GET /weights`: what a server serves.

    Attributes:
        version: None before the first weights.
        digest: of them.
        model: its name.
        boot_id: of the server: another one means that it was restarted.
    """

    version: int | None
    digest: str | None
    model: str
    boot_id: str


class PushedWeights(msgspec.Struct):
    """Body of `POST /update_weights`: a version of the run that owns the server from then on."""

    path: str
    version: int
    owner: Owner


class Refusal(msgspec.Struct):
    """An answer that is an error: the reason, and for some what a program can go by."""

    error: str = ""
    code: str = ""


class ModelCard(msgspec.Struct):
    """One model of `GET /v1/models`."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
