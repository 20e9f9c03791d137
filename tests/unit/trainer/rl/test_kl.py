"""The coefficients of KL penalty and entropy bonus, which are steered, and the penalty as a term of the loss.

The estimators themselves: test_every_name_computes.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config.algorithm import EntropyConfig, PolicyLossConfig
from holdfast.config.base import KlEstimator
from holdfast.errors import TrainingError
from holdfast.trainer.rl.kl import EntropyCoefficient, KlCoefficient
from holdfast.trainer.rl.losses import build_policy_loss, with_kl_term
from tests.builders.policy_inputs import policy_input
from tests.builders.slow_preferences import KL_ESTIMATES


@pytest.mark.parametrize(
    ("kl", "coef"), [(12.0, 0.201024), (6.0, 0.2), (3.0, 0.198976), (6.6, 0.200512), (-50.0, 0.198976)]
)
def test_the_coefficient_of_the_worked_examples(kl: float, coef: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0, horizon=10_000)
    coefficient.update(kl, 256)
    assert coefficient.coef == pytest.approx(coef, abs=1e-12) and coefficient.num_updates == 1


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_divergence_that_is_no_number_changes_nothing_and_is_told(kl: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0)
    with pytest.raises(TrainingError, match=f"divergence from the reference is {kl}"):
        coefficient.update(kl, 256)
    assert (coefficient.coef, coefficient.num_updates) == (0.2, 0)


def test_a_configured_coefficient_of_the_penalty_wins_over_the_checkpoint() -> None:
    saved = KlCoefficient(0.2, target=6.0, horizon=100)
    saved.update(12.0, 50)
    changed = KlCoefficient(0.5, target=3.0, horizon=200)
    changed.restore(saved.values())
    assert changed.values() == {"coef": saved.coef, "target": 3.0, "horizon": 200, "num_updates": 1}
    fixed = KlCoefficient(0.5)
    fixed.restore(saved.values())
    fixed.update(100.0, 256)
    assert (fixed.coef, fixed.num_updates) == (0.5, 2), "without a target it stays, and updates count"


# Two sequences of two tokens and one: weights 1/4, 1/4, 1/2 by sequence, 1/3 each by token.
LOGPROBS, REFERENCE, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5], [0.5, 0.5, -1.0]
WEIGHTS = {"sequence": [0.25, 0.25, 0.5], "token": [1 / 3] * 3}
IN_LOSSES = [name for name in KL_ESTIMATES if name != "k1"]


def value_and_gradient(loss: Any) -> tuple[float, list[float], dict[str, Tensor]]:
    logprobs_N = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    reference_N, advantages_N, weights_N = torch.tensor(
        [REFERENCE, ADVANTAGES, WEIGHTS["sequence"]], dtype=torch.float64
    )
    value, counts = loss(policy_input(
        logprobs_N, old_logprobs_N=logprobs_N.detach(), sampler_logprobs_N=logprobs_N.detach(),
        advantages_N=advantages_N, weights_N=weights_N, sequence_N=torch.tensor([0, 0, 1]), step_sequences=2,
        step_tokens=3, reference_logprobs_N=reference_N,
    ))  # fmt: skip
    (gradient_N,) = torch.autograd.grad(value, logprobs_N)
    return float(value.detach()), gradient_N.tolist(), counts


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
@pytest.mark.parametrize("estimator", IN_LOSSES)
def test_the_term_has_the_weights_of_the_loss(estimator: KlEstimator, aggregation: Any) -> None:
    config = PolicyLossConfig(type="policy_gradient", aggregation=aggregation)
    plain = build_policy_loss(config)
    penalised = with_kl_term(plain, config, KlCoefficient(0.3), estimator)
    (base, base_slopes, base_counts), (value, slopes, counts) = value_and_gradient(plain), value_and_gradient(penalised)
    weights, ds = WEIGHTS[aggregation], [p - r for p, r in zip(LOGPROBS, REFERENCE, strict=True)]
    term = sum(weight * KL_ESTIMATES[estimator](d, 1.0)[0] for weight, d in zip(weights, ds, strict=True))
    assert value == pytest.approx(base + 0.3 * term, rel=1e-12)
    for slope, before, weight, d in zip(slopes, base_slopes, weights, ds, strict=True):
        assert slope == pytest.approx(before + 0.3 * weight * KL_ESTIMATES[estimator](d, 1.0)[1], rel=1e-12)
    assert counts.keys() == base_counts.keys()


STEERED = EntropyConfig(coef=0.01, target=0.5, step_size=0.004, largest=0.02)


def test_a_fixed_bonus_stays() -> None:
    coefficient = EntropyCoefficient(EntropyConfig(coef=0.3))
    coefficient.update(0.0)
    assert coefficient.coef == 0.3 and coefficient.tensors() == {}


def test_a_steered_bonus_is_that_of_the_slow_one() -> None:
    generator = random.Random(0)
    coefficient, expected, last = EntropyCoefficient(STEERED), 0.01, None
    for _ in range(200):
        assert coefficient.coef == pytest.approx(expected if last is not None and last <= 0.5 else 0.0, abs=1e-12)
        last = generator.choice([generator.random(), 0.5])
        expected = min(expected + 0.004, 0.02) if last <= 0.5 else max(expected - 0.004, 0.0)
        coefficient.update(last)


def test_a_configured_largest_bonus_wins_over_the_checkpoint() -> None:
    lower = EntropyCoefficient(EntropyConfig(target=0.5, largest=0.001))
    lower.restore({"steered": 0.02, "last": 0.1})
    assert lower.coef == 0.001
