"""KL estimators and the adaptive coefficient against values worked out by hand, and exact expectations."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from holdfast.shared.errors import TrainingError
from holdfast.trainer.rl.regularization.coefficients import KlCoefficient
from holdfast.trainer.rl.regularization.kl import KlEstimator, estimate_kl

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
POLICY = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-1.2, -1.5, -0.5], dtype=torch.float64)


def through_json(values: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values))


def through_msgpack(values: dict[str, Any]) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(values))


@pytest.mark.parametrize(("estimator", "mean"), [("k1", -0.1), ("k2", 0.0483333), ("k3", 0.0558173)])
def test_estimators_of_the_worked_example(estimator: KlEstimator, mean: float) -> None:
    per_token = estimate_kl(POLICY, REFERENCE, estimator)
    assert per_token.shape == POLICY.shape
    assert per_token.mean().item() == pytest.approx(mean, abs=1e-7)


@pytest.mark.parametrize(("estimator", "mean"), [("k1", 0.0666667), ("k2", 0.0166667), ("k3", 0.0153297)])
def test_the_old_policy_against_the_new_of_the_worked_example(estimator: KlEstimator, mean: float) -> None:
    """d = l_new - l_old = .1, -.3, 0, of tokens that the old one sampled."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    new = old + torch.tensor([0.1, -0.3, 0.0], dtype=torch.float64)
    assert estimate_kl(old, new, estimator).mean().item() == pytest.approx(mean, abs=1e-7)


def test_k3_takes_reference_over_policy_and_not_the_reverse() -> None:
    # d = l_pi - l_ref = .2, -.5, 0: exp(-d) + d - 1 = 0.0187308, 0.1487213, 0.
    expected = [math.exp(-0.2) + 0.2 - 1, math.exp(0.5) - 0.5 - 1, 0.0]
    assert estimate_kl(POLICY, REFERENCE, "k3").tolist() == pytest.approx(expected, abs=1e-12)
    wrong_way = estimate_kl(REFERENCE, POLICY, "k3").mean().item()
    assert wrong_way == pytest.approx((math.exp(0.2) - 1.2 + math.exp(-0.5) - 0.5) / 3)
    assert abs(wrong_way - 0.0558173) > 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_divergence_between_equal_weights(estimator: KlEstimator) -> None:
    assert estimate_kl(POLICY, POLICY.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


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


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    torch.manual_seed(0)
    policy, reference = (torch.randn(5, dtype=torch.float64).log_softmax(0) for _ in range(2))
    divergence = (policy.exp() * (policy - reference)).sum().item()
    means = {name: (policy.exp() * estimate_kl(policy, reference, name)).sum().item() for name in ESTIMATORS}
    assert means["k1"] == pytest.approx(divergence) and means["k3"] == pytest.approx(divergence)
    assert abs(means["k2"] - divergence) > 0.01


@pytest.mark.parametrize(("kl", "coef"), [(12.0, 0.201024), (6.0, 0.2), (3.0, 0.198976), (6.6, 0.200512)])
def test_the_coefficient_of_the_worked_examples(kl: float, coef: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0, horizon=10_000)
    coefficient.update(kl, 256)
    assert coefficient.coef == pytest.approx(coef, abs=1e-12) and coefficient.num_updates == 1


def test_a_negative_estimate_lowers_the_coefficient_no_further_than_the_clip() -> None:
    coefficient = KlCoefficient(0.2, target=6.0)
    coefficient.update(-50.0, 256)
    assert coefficient.coef == pytest.approx(0.198976, abs=1e-12)


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


@pytest.mark.parametrize("travel", [through_json, through_msgpack])
def test_a_coefficient_saved_between_two_updates_goes_on_exactly(travel: Any) -> None:
    straight, broken_off = (KlCoefficient(0.1, target=0.7, horizon=321) for _ in range(2))
    straight.update(1.3, 77)
    broken_off.update(1.3, 77)
    resumed = KlCoefficient(0.1, target=0.7, horizon=321)
    resumed.restore(travel(broken_off.values()))
    straight.update(0.61, 33)
    resumed.update(0.61, 33)
    assert resumed.values() == straight.values() and straight.num_updates == 2
    assert resumed.tensors() == {}


def test_what_is_configured_wins_over_the_checkpoint() -> None:
    saved = KlCoefficient(0.2, target=6.0, horizon=100)
    saved.update(12.0, 50)
    changed = KlCoefficient(0.5, target=3.0, horizon=200)
    changed.restore(saved.values())
    assert changed.values() == {"coef": saved.coef, "target": 3.0, "horizon": 200, "num_updates": 1}
    fixed = KlCoefficient(0.5)
    fixed.restore(saved.values())
    assert (fixed.coef, fixed.num_updates) == (0.5, 1)
