"""Engines of a model that stays the same as long as the run lasts: nothing is pushed to them."""

from __future__ import annotations

from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.engines.engine import Engine
from holdfast.orchestrator.task_group import run_all
from holdfast.shared.errors import InferenceError


async def adopt_served_weights(client: InferenceClient, *, key: str) -> str:
    """Take what all servers serve as what they must always serve, and return its digest.

    Args:
        key: of their section in the orchestrator's configuration, for errors.

    Raises:
        InferenceError: a server has no weights, or two serve different ones.
    """
    engines = client.engines
    found = await run_all(engine.retry(engine.served) for engine in engines)
    expected = found[0].digest
    for engine, served in zip(engines, found, strict=True):
        if expected is None or served.version is None or served.digest is None:
            raise InferenceError(f"{engine.url} has no weights. Start it with --model.load auto.")
        if served.digest != expected:
            raise InferenceError(
                f"{engine.url} serves weights with digest {served.digest}, {engines[0].url} with digest "
                f"{expected}: all servers of {key}.urls must serve the same"
            )
    assert expected is not None

    async def check_unchanged(engine: Engine) -> None:
        served = await engine.retry(engine.served)
        if served.digest != expected:
            raise InferenceError(
                f"{engine.url} came back with other weights: digest {served.digest}, was {expected}. "
                "Does a run push weights to it? A teacher must not be trained."
            )

    client.expect(version=None, restore=check_unchanged)
    return expected
