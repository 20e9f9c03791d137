"""KL estimators and the adaptive coefficient against values worked out by hand, and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from holdfast.errors import TrainingError
from holdfast.trainer.rl.kl import KlCoefficient, KlEstimator, estimate_kl

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
POLICY = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-1.2, -1.5, -0.5], dtype=torch.float64)


@pytest.mark.parametrize(("estimator", "mean"), [("k1", -0.1), ("k2", 0.0483333), ("k3", 0.0558173)])
def test_estimators_of_the_worked_example(estimator: KlEstimator, mean: float) -> None:
    per_token = estimate_kl(POLICY, REFERENCE, estimator)
    assert per_token.shape == POLICY.shape
    assert per_token.mean().item() == pytest.approx(mean, abs=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_by_finite_differences(estimator: KlEstimator) -> None:
    policy = POLICY.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logprobs: estimate_kl(logprobs, REFERENCE, estimator), (policy,))
    (gradient,) = torch.autograd.grad(estimate_kl(policy, REFERENCE, estimator).sum(), policy)
    d = [0.2, -0.5, 0.0]
    expected = {"k1": [1.0] * 3, "k2": d, "k3": [1 - math.exp(-value) for value in d]}[estimator]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-12)


def expected_gradient(estimator: KlEstimator, logits: Tensor, reference: Tensor) -> Tensor:
    """Return E over the policy's tokens of the gradient of the estimate, by enumeration of the vocabulary."""
    total = torch.zeros_like(logits)
    probabilities = logits.softmax(0)
    for token in range(len(logits)):
        leaf = logits.clone().requires_grad_()
        estimate = estimate_kl(leaf.log_softmax(0)[token], reference[token], estimator)
        total += probabilities[token] * torch.autograd.grad(estimate, leaf)[0]
    return total


def kl_gradient(logits: Tensor, reference: Tensor, *, forward: bool) -> Tensor:
    leaf = logits.clone().requires_grad_()
    policy = leaf.log_softmax(0)
    towards = (reference.exp() * (reference - policy)) if forward else (policy.exp() * (policy - reference))
    return torch.autograd.grad(towards.sum(), leaf)[0]


def test_only_k2_has_the_gradient_of_the_divergence_on_policy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    right = kl_gradient(logits, reference, forward=False)
    assert right.norm() > 0.1
    torch.testing.assert_close(expected_gradient("k1", logits, reference), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2", logits, reference), right)
    k3 = expected_gradient("k3", logits, reference)
    torch.testing.assert_close(k3, kl_gradient(logits, reference, forward=True))
    assert (k3 - right).norm() > 0.1


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
