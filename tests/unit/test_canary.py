"""The canary: what the trainer computes is what transformers computes, and an engine that differs is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.client import InferenceClient
from orchestrator.weights import describe_weights, read_canary
from tests.unit.orchestrator_fakes import FakeEngine, publish_weights, serving
from trainer.models.model import build_policy
from trainer.parallel import Parallel
from trainer.policy.canary import measure_canary
from triad.canary import CANARY_NAME, TEXT, Canary, deviation
from triad.config.orchestrator import ClientConfig
from triad.config.trainer import TrainedModelConfig
from triad.errors import CheckpointError, InferenceError
from triad.run_dir import RunDir

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text" / "model"


@pytest.mark.parametrize(
    ("theirs", "is_fine"),
    [
        ([-1.0, -2.0, -3.0], True),
        ([-1.1, -2.1, -3.1], True),
        ([-1.4, -2.0, -3.5], False),
        ([-1.0, -2.0], False),
        ([], False),
        ([float("nan")] * 3, False),
    ],
)
def test_small_differences_are_rounding_and_large_ones_are_not(theirs: list[float], is_fine: bool) -> None:
    found, allowed = deviation(Canary([5, 6, 7, 8], [-1.0, -2.0, -3.0]), theirs)
    assert (found <= allowed) is is_fine


def test_the_trainer_measures_what_transformers_computes(parallel: Parallel) -> None:
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), parallel, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    before = torch.get_rng_state()
    data = measure_canary(policy, tokenizer, parallel)
    assert data is not None
    canary = msgspec.json.decode(data, type=Canary)
    assert policy.training and torch.equal(torch.get_rng_state(), before), "training goes on as if nothing was measured"
    assert canary.token_ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"][: len(canary.token_ids)]
    ids = torch.tensor([canary.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL)(ids).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(canary.logprobs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("logprob", "is_fine"), [(-1.5, True), (-1.6, True), (-2.5, False)])
def test_an_engine_that_computes_something_else_is_refused(logprob: float, is_fine: bool) -> None:
    engine = FakeEngine()
    engine.version, engine.digest = 0, "digest"
    canary = Canary([4, 5, 6], [logprob, logprob])

    async def check() -> None:
        async with InferenceClient(ClientConfig(urls=[engine.url])) as client:
            await client.check_canary(canary)

    with serving(engine):
        if is_fine:
            asyncio.run(check())
        else:
            with pytest.raises(InferenceError, match="computes other log-probabilities.* 1 nats apart"):
                asyncio.run(check())


def test_weights_may_come_without_a_canary_but_not_with_a_broken_one(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path)
    publish_weights(run_dir, 3, b"weights")
    weights = describe_weights(run_dir, 3)
    assert read_canary(weights) is None
    (weights.path / CANARY_NAME).write_bytes(b'{"token_ids": [1, 2], "logprobs": [-0.5]}')
    assert read_canary(weights) == Canary([1, 2], [-0.5])
    (weights.path / CANARY_NAME).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"canary\.json is damaged"):
        read_canary(weights)
