"""Engines of a model that stays the same as long as the run lasts: nothing is pushed to them."""

from __future__ import annotations

from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.engines.engine import Engine
from holdfast.shared.errors import InferenceError
from holdfast.shared.wire.inference_api import ServedWeights


async def adopt_served_weights(client: InferenceClient, *, key: str) -> str:
    """Take what all servers that are there serve as what all must always serve, and return its digest.

    Args:
        key: of their section in the orchestrator's configuration, for errors.

    Raises:
        InferenceError: a server has no weights, or two serve different ones.
    """
    found: dict[Engine, ServedWeights] = {}

    async def look(engine: Engine) -> None:
        found[engine] = await engine.served()

    while not found:
        await client.pool.wait_for_any()
        await client.pool.attend(look)
    first, expected = next((engine, served.digest) for engine, served in found.items())
    for engine, served in found.items():
        if expected is None or served.version is None or served.digest is None:
            raise InferenceError(f"{engine.url} has no weights. Start it with --model.load auto.")
        if served.digest != expected:
            raise InferenceError(
                f"{engine.url} serves weights with digest {served.digest}, {first.url} with digest "
                f"{expected}: all servers of {key}.urls must serve the same"
            )
    assert expected is not None

    async def check_unchanged(engine: Engine) -> None:
        served = await engine.served()
        if served.digest != expected:
            raise InferenceError(
                f"{engine.url} came back with other weights: digest {served.digest}, was {expected}. "
                "Does a run push weights to it? A teacher must not be trained."
            )

    client.expect(version=None, restore=check_unchanged)
    return expected
