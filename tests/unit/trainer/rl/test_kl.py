"""KL estimators and the adaptive coefficient against values worked out by hand, and exact expectations."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from holdfast.config.base import KlEstimator
from holdfast.errors import TrainingError
from holdfast.trainer.rl.kl import MAX_KL_WEIGHT, KlCoefficient, estimate_kl

POLICY = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-1.2, -1.5, -0.5], dtype=torch.float64)


@pytest.mark.parametrize(("estimator", "mean"), [("k1", -0.1), ("k2", 0.0483333), ("k3", 0.0558173)])
def test_estimators_of_the_worked_example(estimator: KlEstimator, mean: float) -> None:
    per_token = estimate_kl(POLICY, REFERENCE, estimator)
    assert per_token.shape == POLICY.shape
    assert per_token.mean().item() == pytest.approx(mean, abs=1e-7)


def expected_gradient(estimator: KlEstimator, logits: Tensor, reference: Tensor, *, base: Tensor) -> Tensor:
    """Return E over the base's tokens of the gradient of the estimate, by enumeration of the vocabulary."""
    total = torch.zeros_like(logits)
    for token in range(len(logits)):
        leaf = logits.clone().requires_grad_()
        estimate = estimate_kl(leaf.log_softmax(0)[token], reference[token], estimator, base_logprobs_N=base[token])
        total += base[token].exp() * torch.autograd.grad(estimate, leaf)[0]
    return total


def kl_gradient(logits: Tensor, reference: Tensor, *, forward: bool) -> Tensor:
    leaf = logits.clone().requires_grad_()
    policy = leaf.log_softmax(0)
    towards = (reference.exp() * (reference - policy)) if forward else (policy.exp() * (policy - reference))
    return torch.autograd.grad(towards.sum(), leaf)[0]


def test_k2_has_the_gradient_of_the_divergence_on_policy_and_unbiased_k3_off_policy_too() -> None:
    torch.manual_seed(0)
    logits, other = torch.randn(2, 5, dtype=torch.float64)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    right = kl_gradient(logits, reference, forward=False)
    assert right.norm() > 0.1
    on_policy, off_policy = (
        {name: expected_gradient(name, logits, reference, base=base) for name in get_args(KlEstimator)}
        for base in (logits.log_softmax(0), other.log_softmax(0))
    )
    torch.testing.assert_close(on_policy["k1"], torch.zeros(5, dtype=torch.float64))
    for found in (on_policy["k2"], on_policy["k3_unbiased"], off_policy["k3_unbiased"]):
        torch.testing.assert_close(found, right)
    torch.testing.assert_close(on_policy["k3"], kl_gradient(logits, reference, forward=True))
    for found in (on_policy["k3"], off_policy["k1"], off_policy["k2"], off_policy["k3"]):
        assert (found - right).norm() > 0.1


def test_no_importance_ratio_weighs_a_token_of_the_kl_term_by_more_than_20() -> None:
    logprob = torch.tensor(-0.5, dtype=torch.float64, requires_grad=True)
    for base, weight in ((-0.5 - math.log(19), 19.0), (-5.0, MAX_KL_WEIGHT), (-90.0, MAX_KL_WEIGHT)):
        found = estimate_kl(logprob, torch.tensor(-1.0), "k3_unbiased", base_logprobs_N=torch.tensor(base).double())
        assert found.item() == pytest.approx(weight * (math.exp(-0.5) + 0.5 - 1))
        assert torch.autograd.grad(found, logprob)[0].item() == pytest.approx(weight * 0.5)


@pytest.mark.parametrize(
    ("kl", "coef"), [(12.0, 0.201024), (6.0, 0.2), (3.0, 0.198976), (6.6, 0.200512), (-50.0, 0.198976)]
)
def test_the_coefficient_of_the_worked_examples(kl: float, coef: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0, horizon=10_000)
    coefficient.update(kl, 256)
    assert coefficient.coef == pytest.approx(coef, abs=1e-12) and coefficient.num_updates == 1


def test_without_a_target_the_coefficient_stays_and_updates_count() -> None:
    coefficient = KlCoefficient(0.2)
    coefficient.update(100.0, 256)
    assert coefficient.coef == 0.2 and coefficient.num_updates == 1


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_divergence_that_is_no_number_changes_nothing_and_is_told(kl: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0)
    with pytest.raises(TrainingError, match=f"divergence from the reference is {kl}"):
        coefficient.update(kl, 256)
    assert (coefficient.coef, coefficient.num_updates) == (0.2, 0)


def test_what_is_configured_wins_over_the_checkpoint() -> None:
    saved = KlCoefficient(0.2, target=6.0, horizon=100)
    saved.update(12.0, 50)
    changed = KlCoefficient(0.5, target=3.0, horizon=200)
    changed.restore(saved.values())
    assert changed.values() == {"coef": saved.coef, "target": 3.0, "horizon": 200, "num_updates": 1}
    fixed = KlCoefficient(0.5)
    fixed.restore(saved.values())
    assert (fixed.coef, fixed.num_updates) == (0.5, 1)
