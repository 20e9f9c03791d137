"""The proof that engines compute with the weights that they report what the trainer computes with them."""

from __future__ import annotations

import logging

from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.engines.engine import Engine
from holdfast.shared.errors import InferenceError
from holdfast.shared.wire.canary import Canary, deviation
from holdfast.shared.wire.inference_api import GenerateRequest

_log = logging.getLogger("orchestrator")


async def check_canary(client: InferenceClient, engine: Engine, canary: Canary, *, weights_digest: str) -> None:
    """Have an engine compute the canary's log-probabilities with the weights that it is of, and compare.

    Raises:
        Unavailable: it was lost meanwhile.
        InferenceError: it computes something else from the weights that it reports.
    """
    request = GenerateRequest(
        token_ids=canary.token_ids,
        seeds=[0],
        max_tokens=1,
        stop_token_ids=[],
        weights_digest=weights_digest,
        prompt_logprobs=True,
    )
    (choice,) = await client.ask(engine, request)
    found, allowed = deviation(canary, choice.prompt_logprobs or []), canary.allowed_nats
    _log.info("%s: canary differs by %.2g nats from the trainer's (allowed: %s)", engine.url, found, allowed)
    # `not <=` rather than `>`: NaN is refused, too.
    if allowed is not None and not found <= allowed:
        raise InferenceError(
            f"{engine.url} serves the right weights, but computes other log-probabilities from them than the "
            f"trainer: {found:.3g} nats apart on average for a fixed text, allowed are {allowed:.3g}. One of "
            "the two leaves out a detail of the architecture, such as an attention soft cap (try "
            "--trainer.model.attention eager), or has another dtype (--trainer.sampler-dtype), config.json or "
            "a faulty kernel. If the difference is meant, raise --trainer.mismatch-limit."
        )
