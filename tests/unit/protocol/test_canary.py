"""The canary on the wire, and an engine that computes something else is refused."""

import asyncio
import math
from pathlib import Path

import pytest

from holdfast.config.orchestrator import ClientConfig
from holdfast.errors import CheckpointError, InferenceError
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.weight_sync import check_canary, describe_weights
from holdfast.protocol.inference import CANARY_NAME, Canary, deviation
from holdfast.run.run_dir import RunDir
from tests.servers.orchestrator_fakes import FakeEngine, publish_weights, serving


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ([-1.0, -2.0, -3.0], 0.0),
        ([-1.5, -2.0, -2.0], 0.5),
        ([-1.0, -2.0], math.inf),
        ([], math.inf),
        ([float("nan")] * 3, math.nan),
    ],
)
def test_a_deviation_is_a_mean_absolute_difference(theirs: list[float], expected: float) -> None:
    found = deviation(Canary([5, 6, 7, 8], [-1.0, -2.0, -3.0], 0.1), theirs)
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_canary_is_cut_to_what_engines_take() -> None:
    canary = Canary([5, 6, 7, 8], [-1.0, -2.0, -3.0], 0.1)
    assert canary.head(9) == canary.head(4) == canary
    assert canary.head(2) == Canary([5, 6], [-1.0], 0.1)
    assert canary.head(1) == Canary([5], [], 0.1) and deviation(canary.head(1), []) == 0.0


@pytest.mark.parametrize(
    ("logprob", "allowed", "is_fine"),
    [(-1.5, 1e-3, True), (-1.505, 1e-3, False), (-1.6, 0.2, True), (-2.5, 0.2, False), (-2.5, None, True)],
)
def test_an_engine_that_computes_something_else_is_refused(
    logprob: float, allowed: float | None, is_fine: bool
) -> None:
    engine = FakeEngine()
    engine.version, engine.digest = 0, "digest"
    canary = Canary([4, 5, 6], [logprob, logprob], allowed)

    async def check() -> None:
        async with InferenceClient(ClientConfig(urls=[engine.url])) as client:
            await check_canary(client, client.engines[0], canary, weights_digest="digest")

    with serving(engine):
        if is_fine:
            asyncio.run(check())
        else:
            with pytest.raises(
                InferenceError, match=f"computes other log-probabilities.* {abs(logprob + 1.5):.3g} nats apart"
            ):
                asyncio.run(check())


def test_weights_may_come_without_a_canary_but_not_with_a_broken_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 3, b"weights")
    weights = describe_weights(run_dir, 3)
    assert weights.read_canary() is None
    (weights.path / CANARY_NAME).write_bytes(b'{"token_ids": [1, 2], "logprobs": [-0.5], "allowed_nats": null}')
    assert weights.read_canary() == Canary([1, 2], [-0.5], None)
    (weights.path / CANARY_NAME).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"canary\.json is damaged"):
        weights.read_canary()
