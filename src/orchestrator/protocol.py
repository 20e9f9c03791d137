"""What orchestrator and inference servers say to each other, as JSON."""

from __future__ import annotations

import msgspec

from orchestrator.environment import Completion


class GenerateRequest(msgspec.Struct):
    """Body of `POST /inference/v1/generate`: one choice is sampled per seed."""

    token_ids: list[int]
    seeds: list[int]
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    prompt_logprobs: bool = False


class Choice(Completion):
    """One sampled continuation; `index` counts the seeds."""

    index: int = 0
    prompt_logprobs: list[float] | None = None


class GenerateResponse(msgspec.Struct):
    """Answer of `POST /inference/v1/generate`."""

    choices: list[Choice]
    version: int


class ServedWeights(msgspec.Struct):
    """Answer of `GET /weights`: what a server serves; version and digest are None before the first weights."""

    version: int | None
    digest: str | None
    model: str


class ModelCard(msgspec.Struct):
    """One model of `GET /v1/models`."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
