"""The canary: what the trainer computes is what transformers computes."""

import math
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.config import TrainerConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.protocol.inference import TEXT, Canary
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.rl.mismatch import measure_canary
from tests.conftest import ROOT

MODEL = ROOT / "examples" / "reverse_text" / "model"


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, math.sqrt(2e-6)),
        ({"sampler_dtype": "bfloat16"}, math.sqrt(0.1)),
        ({"model": {"dtype": "bfloat16"}}, math.sqrt(0.1)),
        ({"mismatch_limit": 0.5}, 1.0),
        ({"mismatch_limit": math.inf}, None),
    ],
)
def test_what_is_allowed_follows_dtypes_and_the_setting(
    changes: dict[str, Any], allowed: float | None, mesh: Mesh
) -> None:
    config = TrainerConfig.model_validate({"model": {"name": str(MODEL)}} | changes)
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), mesh, seed=0)
    data = measure_canary(policy, AutoTokenizer.from_pretrained(MODEL), mesh, config=config)
    assert data is not None
    assert msgspec.json.decode(data, type=Canary).allowed_nats == (allowed and pytest.approx(allowed))


def test_the_trainer_measures_what_transformers_computes(mesh: Mesh) -> None:
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), mesh, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    before = torch.get_rng_state()
    data = measure_canary(policy, tokenizer, mesh, config=TrainerConfig())
    assert data is not None
    canary = msgspec.json.decode(data, type=Canary)
    assert policy.training and torch.equal(torch.get_rng_state(), before), "training goes on as if nothing was measured"
    assert canary.token_ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"][: len(canary.token_ids)]
    ids = torch.tensor([canary.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL)(ids).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(canary.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_one_token_says_nothing_of_what_follows_it(mesh: Mesh) -> None:
    policy = build_policy(TrainedModelConfig(name=str(MODEL)), mesh, seed=0)

    def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [5]}

    assert measure_canary(policy, tokenizer, mesh, config=TrainerConfig()) is None  # type: ignore[arg-type]
