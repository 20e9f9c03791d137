"""Token ids in, token ids and log-probabilities out: the route that rollouts use.

It talks to the engine directly: no text, no chat template, one choice per seed, and every
choice says which weights sampled it: version and digest of each span of tokens. The numbers of an
answer stay packed until they are encoded.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from holdfast.inference.access import RequestError
from holdfast.inference.weights import EngineWeights
from holdfast.protocol.inference import OTHER_WEIGHTS, Choice, GenerateRequest, GenerateResponse

# What vLLM samples at as asked: it raises lower temperatures in silence, and refuses higher ones.
_MIN_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 2.0


class SamplingEngine(Protocol):
    """An engine, as the routes see it: `inference.engine.VllmSampler`, or the numpy engine of the tests.

    Attributes:
        max_len: most tokens of prompt and completion together.
        vocab_size: token ids are below it.
        died: the exception that every call raises after the engine has ended.
    """

    max_len: int
    vocab_size: int
    died: type[Exception]

    @property
    def has_died(self) -> bool:
        """Whether the engine has ended."""
        ...

    async def sample(self, request: GenerateRequest, index: int, seed: int) -> Choice:
        """Sample one choice. Cancelling this drops it.

        Raises:
            RequestError: 400, the engine refuses the request.
        """
        ...

    async def probe(self, *, generates: bool) -> str | None:
        """Have the engine answer, with a token if it may generate one; return why it cannot, or None."""
        ...


class Generator:
    """Answers generate requests with one engine."""

    def __init__(self, sampler: SamplingEngine, engine_weights: EngineWeights) -> None:
        self._sampler = sampler
        self._engine_weights = engine_weights

    def check(self, request: GenerateRequest) -> None:
        """Refuse what the engine would cut short or die of.

        Raises:
            RequestError: 400.
        """
        total = len(request.token_ids) + request.max_tokens
        if total > self._sampler.max_len:
            raise RequestError(
                400,
                f"{len(request.token_ids)} prompt tokens + max_tokens {request.max_tokens} = {total} exceed "
                f"the model's length of {self._sampler.max_len} (model.max_len)",
            )
        for name, ids in (("token_ids", request.token_ids), ("stop_token_ids", request.stop_token_ids)):
            if ids and (largest := max(ids)) >= self._sampler.vocab_size:
                raise RequestError(400, f"{name} holds {largest}, the vocabulary has {self._sampler.vocab_size} tokens")
        if request.temperature != 0 and not _MIN_TEMPERATURE <= request.temperature <= _MAX_TEMPERATURE:
            raise RequestError(
                400,
                f"temperature is {request.temperature}; allowed are 0 and {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}",
            )

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Sample one choice per seed. Cancelling this aborts them all in the engine.

        Raises:
            RequestError: 400 for a request that cannot be served, 409 for one that is for other weights, 503 for
                one that the end of the server cut off.
        """
        self.check(request)
        if request.weights_digest is not None:
            self._engine_weights.require(request.weights_digest)
        # Before the request: whatever changes from here on shows in it.
        num_updates = self._engine_weights.num_updates
        choices = await asyncio.gather(
            *(self._sampler.sample(request, index, seed) for index, seed in enumerate(request.seeds))
        )
        versions = [span.version for choice in choices for span in choice.versions]
        if not versions:
            raise RequestError(503, "the request was aborted before a token was sampled: the server is stopping")
        if (
            request.weights_digest is not None
            and request.prompt_logprobs
            and self._engine_weights.num_updates != num_updates
        ):
            # Spans tell the tokens that were sampled; those of the prompt may be of both.
            raise RequestError(
                409, "the weights were replaced while the prompt's log-probabilities were computed", code=OTHER_WEIGHTS
            )
        return GenerateResponse(choices=choices, version=max(versions), boot_id=self._engine_weights.boot_id)
