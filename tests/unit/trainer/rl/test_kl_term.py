"""The KL penalty as a term of the loss: its value, its gradient, and the coefficient of the moment."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config.algorithm import PolicyLossConfig
from holdfast.config.base import KlEstimator
from holdfast.trainer.rl.kl import KlCoefficient
from holdfast.trainer.rl.losses import PolicyLossInput, build_policy_loss, with_kl_term
from tests.builders.policy_inputs import policy_input
from tests.builders.slow_preferences import KL_ESTIMATES

# Two sequences of two tokens and one: weights 1/4, 1/4, 1/2 by sequence, 1/3 each by token.
LOGPROBS, REFERENCE, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5], [0.5, 0.5, -1.0]
WEIGHTS = {"sequence": [0.25, 0.25, 0.5], "token": [1 / 3] * 3}
IN_LOSSES = [name for name in KL_ESTIMATES if name != "k1"]


def loss_input(logprobs_N: Tensor) -> PolicyLossInput:
    fixed_N = torch.tensor(LOGPROBS, dtype=torch.float64)
    return policy_input(
        logprobs_N, old_logprobs_N=fixed_N, sampler_logprobs_N=fixed_N,
        advantages_N=torch.tensor(ADVANTAGES, dtype=torch.float64),
        weights_N=torch.tensor(WEIGHTS["sequence"], dtype=torch.float64),
        sequence_N=torch.tensor([0, 0, 1]), step_sequences=2, step_tokens=3,
        reference_logprobs_N=torch.tensor(REFERENCE, dtype=torch.float64),
    )  # fmt: skip


def value_and_gradient(loss: Any) -> tuple[float, list[float], dict[str, Tensor]]:
    logprobs_N = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    value, counts = loss(loss_input(logprobs_N))
    value.backward()
    assert logprobs_N.grad is not None
    return float(value.detach()), logprobs_N.grad.tolist(), counts


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


@pytest.mark.parametrize("far", [-120.0, 120.0])
@pytest.mark.parametrize("estimator", IN_LOSSES)
def test_a_term_is_finite_however_far_the_reference(estimator: Any, far: float) -> None:
    logprobs_N = torch.tensor([-1.0], requires_grad=True)
    near_N = logprobs_N.detach()
    data = policy_input(
        logprobs_N, old_logprobs_N=near_N, sampler_logprobs_N=near_N, advantages_N=0 * near_N, weights_N=near_N.abs(),
        sequence_N=torch.zeros(1), step_sequences=1, step_tokens=1, reference_logprobs_N=near_N + far,
    )  # fmt: skip
    config = PolicyLossConfig(type="grpo")
    loss, _ = with_kl_term(build_policy_loss(config), config, KlCoefficient(1.0), estimator)(data)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    assert loss.isfinite() and loss < 1.01 * math.exp(20) and gradient_N == 0
