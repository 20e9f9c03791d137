"""The weight of the entropy bonus: fixed, or steered as in Skywork-OR1, and the same after a restart."""

from __future__ import annotations

import random

import pytest

from holdfast.config.algorithm import EntropyConfig
from holdfast.trainer.rl.kl import EntropyCoefficient

STEERED = EntropyConfig(coef=0.01, target=0.5, step_size=0.004, largest=0.02)


def test_a_fixed_coefficient_stays() -> None:
    coefficient = EntropyCoefficient(EntropyConfig(coef=0.3))
    for entropy in (0.0, 5.0):
        assert coefficient.coef == 0.3
        coefficient.update(entropy)
    assert coefficient.coef == 0.3 and coefficient.tensors() == {}


def test_a_steered_coefficient_is_that_of_the_slow_one() -> None:
    generator = random.Random(0)
    coefficient, expected, last = EntropyCoefficient(STEERED), 0.01, None
    for _ in range(200):
        assert coefficient.coef == pytest.approx(expected if last is not None and last <= 0.5 else 0.0, abs=1e-12)
        last = generator.choice([generator.random(), 0.5])
        expected = min(expected + 0.004, 0.02) if last <= 0.5 else max(expected - 0.004, 0.0)
        coefficient.update(last)


def test_what_is_configured_wins_over_the_checkpoint() -> None:
    lower = EntropyCoefficient(EntropyConfig(target=0.5, largest=0.001))
    lower.restore({"steered": 0.02, "last": 0.1})
    assert lower.coef == 0.001
