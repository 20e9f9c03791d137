"""Generalized advantages, the value loss and explained variance: by hand, by slow loops, by finite differences."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.trainer.rl.gae import explained_variance, generalized_advantages, value_loss, value_sums


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_long_sequences_of_float32_lose_no_digits_and_carry_no_gradient() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 4000)
    advantages, returns = generalized_advantages(rewards, values.requires_grad_(), gamma=1.0, lam=1.0)
    expected = math.fsum(rewards.double().tolist())
    assert advantages.dtype == returns.dtype == torch.float64
    assert not advantages.requires_grad and not returns.requires_grad
    assert returns[0].item() == pytest.approx(expected, abs=1e-10)


def test_an_empty_sequence_has_no_advantages_and_unequal_lengths_are_refused() -> None:
    advantages, returns = generalized_advantages(doubles(), doubles(), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (0,)
    with pytest.raises(ValueError, match="longer"):
        generalized_advantages(doubles(1, 2), doubles(1, 2, 3), gamma=1.0, lam=1.0)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        # clip 0.2: the larger of (V - R)^2 and (clip(V) - R)^2, half of it.
        (1.0, 1.0, 3.0, 2.0, -2.0, 0),  # not moved
        (1.1, 1.0, 3.0, 1.805, -1.9, 0),  # moved within the clip
        (1.5, 1.0, 3.0, 1.62, 0.0, 1),  # moved too far towards the target: (1.2 - 3)^2 / 2, no gradient
        (0.5, 1.0, 3.0, 3.125, -2.5, 0),  # moved too far from it: (0.5 - 3)^2 / 2, pulled back
        (-0.5, 0.0, -3.0, 3.92, 0.0, 1),  # the same downwards: (-0.2 + 3)^2 / 2
        (1.5, 1.0, 1.5, 0.045, 0.0, 1),  # on target, yet too far: (1.2 - 1.5)^2 / 2
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: int
) -> None:
    values = doubles(value).requires_grad_()
    got, counts = value_loss(values, doubles(old), doubles(target), doubles(1.0), clip=0.2)
    assert got.item() == pytest.approx(loss)
    assert torch.autograd.grad(got, values)[0].item() == pytest.approx(gradient)
    assert counts["value_clip_fraction"].item() == clipped


def test_value_loss_is_the_weighted_sum_and_counts_trained_tokens() -> None:
    values, old, target = doubles(1.5, 1.5, 0.5), doubles(1, 1, 1), doubles(3, 3, 3)
    loss, counts = value_loss(values, old, target, doubles(0.5, 0.0, 0.25), clip=0.2)
    assert loss.item() == pytest.approx(0.5 * 1.62 + 0.25 * 3.125)
    assert counts["value_clip_fraction"].item() == 1
    loss, counts = value_loss(values, old, target, doubles(0.5, 0.0, 0.25), clip=float("inf"))
    assert loss.item() == pytest.approx(0.5 * 1.125 + 0.25 * 3.125)
    assert counts["value_clip_fraction"].item() == 0


@pytest.mark.parametrize("clip", [float("inf"), 0.3])
def test_gradients_of_the_value_loss_by_finite_differences(clip: float) -> None:
    torch.manual_seed(0)
    values, old, target = torch.randn(3, 50, dtype=torch.float64)
    weights = torch.rand(50, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda values: value_loss(values, old, target, weights, clip=clip)[0], (values.requires_grad_(),)
    )


def slow_explained_variance(returns: list[float], values: list[float]) -> float:
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    return 1 - statistics.pvariance(errors) / statistics.pvariance(returns)


def sums(returns_N: Tensor, values_N: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in value_sums(returns_N, values_N).items()}


def test_explained_variance_by_hand_and_from_the_parts_of_ranks() -> None:
    # Errors -1, 1, -1, 1: variance 1. Returns 0, 4, 0, 4: variance 4.
    assert explained_variance(**sums(doubles(0, 4, 0, 4), doubles(1, 3, 1, 3))) == 0.75
    torch.manual_seed(0)
    returns, noise = torch.randn(2, 100, dtype=torch.float64)
    values = returns + 0.3 * noise + 5
    parts = [sums(returns[part], values[part]) for part in (slice(0, 7), slice(7, 7), slice(7, 100))]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    expected = slow_explained_variance(returns.tolist(), values.tolist())
    assert explained_variance(**total) == pytest.approx(expected)
    assert 0.85 < expected < 1


@pytest.mark.parametrize("returns", [(), (0.0, 0.0), (0.7, 0.7, 0.7), (1e6 / 3,) * 11])
def test_equal_returns_leave_nothing_to_explain(returns: tuple[float, ...]) -> None:
    values = torch.from_numpy(np.arange(len(returns), dtype=np.float64))
    assert math.isnan(explained_variance(**sums(doubles(*returns), values)))
