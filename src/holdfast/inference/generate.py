"""Token ids in, token ids and log-probabilities out: the route that rollouts use.

It talks to vLLM's engine directly: no text, no chat template, one choice per seed, and every
choice says which weights sampled it: version and digest of each span of tokens. The numbers of an
answer stay packed until they are encoded.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from holdfast.inference.request_error import RequestError
from holdfast.inference.weights.engine_weights import EngineWeights, read_label
from holdfast.shared.wire.arrays import Logprobs, TokenIds
from holdfast.shared.wire.inference_api import OTHER_WEIGHTS, Choice, GenerateRequest, GenerateResponse, SampledSpan

# What vLLM samples at as asked: it raises lower temperatures in silence, and refuses higher ones.
_MIN_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 2.0

_request_ids = itertools.count()


class Generator:
    """Answers generate requests with one engine."""

    def __init__(self, engine: AsyncLLM, engine_weights: EngineWeights) -> None:
        self._engine = engine
        self._engine_weights = engine_weights
        self._max_len = engine.model_config.max_model_len
        self._vocab_size = engine.model_config.get_vocab_size()

    def check(self, request: GenerateRequest) -> None:
        """Refuse what the engine would cut short or die of.

        Raises:
            RequestError: 400.
        """
        total = len(request.token_ids) + request.max_tokens
        if total > self._max_len:
            raise RequestError(
                400,
                f"{len(request.token_ids)} prompt tokens + max_tokens {request.max_tokens} = {total} exceed "
                f"the model's length of {self._max_len} (model.max_len)",
            )
        for name, ids in (("token_ids", request.token_ids), ("stop_token_ids", request.stop_token_ids)):
            if ids and (largest := max(ids)) >= self._vocab_size:
                raise RequestError(400, f"{name} holds {largest}, the vocabulary has {self._vocab_size} tokens")
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
            EngineDeadError: the engine ended.
        """
        self.check(request)
        if request.weights_digest is not None:
            self._engine_weights.require(request.weights_digest)
        # Before the request: whatever changes from here on shows in it.
        num_updates = self._engine_weights.num_updates
        try:
            choices = await asyncio.gather(
                *(self._sample(request, index, seed) for index, seed in enumerate(request.seeds))
            )
        except VLLMClientError as error:
            raise RequestError(400, str(error)) from None
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

    async def _sample(self, request: GenerateRequest, index: int, seed: int) -> Choice:
        params = SamplingParams(
            seed=seed,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,  # the stop tokens of the request end it, and nothing else
            logprobs=0,  # that of the sampled token alone
            prompt_logprobs=0 if request.prompt_logprobs else None,
            flat_logprobs=True,  # no object for each token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # made for this request alone
        )
        prompt = tokens_input(request.token_ids)
        async for output in self._engine.generate(prompt, params, f"generate-{next(_request_ids)}"):
            choice = _choice(index, output.outputs[0])
            if request.prompt_logprobs:
                choice.prompt_logprobs = _prompt_logprobs(request.token_ids, output.prompt_logprobs)
            return choice
        raise AssertionError("the engine ended a request without an output")


def _prompt_logprobs(token_ids: list[int], found: Any) -> list[float]:
    """Return the log-probability of every prompt token but the first."""
    return [float(found[place][token_ids[place]].logprob) for place in range(1, len(token_ids))]


def _choice(index: int, output: CompletionOutput) -> Choice:
    logprobs: Any = output.logprobs
    spans = output.weight_versions or []
    return Choice(
        index=index,
        token_ids=TokenIds(output.token_ids),
        logprobs=Logprobs(logprobs.logprobs),
        finish_reason=output.finish_reason or "abort",
        versions=[_span(span.version, span.start, span.end) for span in spans],
    )


def _span(label: str, start: int, end: int) -> SampledSpan:
    version, digest = read_label(label)
    return SampledSpan(version, start, end, digest)
