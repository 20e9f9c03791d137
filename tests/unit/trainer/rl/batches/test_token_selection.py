"""Which tokens are chosen: against slow sums, and over degenerate updates."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from holdfast.shared.config.losses import CovarianceConfig, PolicyLossConfig
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.batches.minibatches import Minibatch
from holdfast.trainer.rl.batches.per_token import ADVANTAGE, HIGH_COVARIANCE, OLD_ENTROPY, OLD_LOGPROB, SELECTED
from holdfast.trainer.rl.batches.token_selection import covariances, covariant, highest, select_tokens

NAMES = (OLD_LOGPROB, OLD_ENTROPY, ADVANTAGE)


def make_samples(seed: int, lengths: tuple[int, ...] = (4, 1, 0, 9, 30)) -> list[Sample]:
    """Samples with this many trained tokens each, behind a prompt of two."""
    generator = np.random.default_rng(seed)
    return [
        Sample(
            np.zeros(length + 2, dtype=np.int32),
            np.arange(length + 2) >= 2,
            {name: generator.normal(size=length + 2).astype(np.float32) for name in NAMES},
        )
        for length in lengths
    ]


def of_targets(samples: list[Sample], name: str) -> list[float]:
    return [float(value) for sample in samples for value in sample.per_token[name][sample.targets]]


def chosen(
    samples: list[Sample], name: str, config: PolicyLossConfig, *, seed: int = 0, update: int = 0
) -> list[float]:
    select_tokens(Minibatch(samples, []), config, seed=seed, update=update)
    return of_targets(samples, name)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.999])
def test_the_share_of_tokens_with_the_highest_entropy(share: float) -> None:
    samples = make_samples(0)
    found = chosen(samples, SELECTED, PolicyLossConfig(top_entropy_share=share))
    entropies = of_targets(samples, OLD_ENTROPY)
    ordered, place = sorted(entropies), (1 - share) * (len(entropies) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = low + (high - low) * (place - math.floor(place))
    assert found == [float(entropy >= threshold) for entropy in entropies]
    assert 1 <= sum(found) <= math.ceil(share * len(entropies)) + 1
    assert HIGH_COVARIANCE not in samples[0].per_token


def test_nothing_is_chosen_by_default() -> None:
    samples = make_samples(0)
    select_tokens(Minibatch(samples, []), PolicyLossConfig(), seed=0, update=0)
    assert set(samples[0].per_token) == set(NAMES)


def test_covariances_are_those_of_the_slow_one_and_sum_to_the_covariance() -> None:
    generator = random.Random(0)
    logprobs, advantages = ([generator.gauss(0, 2) for _ in range(20)] for _ in range(2))
    mean_l, mean_a = sum(logprobs) / 20, sum(advantages) / 20
    expected = [(own - mean_l) * (a - mean_a) for own, a in zip(logprobs, advantages, strict=True)]
    found = covariances(np.array(logprobs), np.array(advantages))
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.mean() == pytest.approx(np.cov(logprobs, advantages, ddof=0)[0, 1])
    assert len(covariances(np.zeros(0), np.zeros(0))) == len(highest(np.zeros(0), 0.2)) == 0


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 1.0])
def test_kl_cov_holds_back_the_highest_covariances(share: float) -> None:
    samples = make_samples(1)
    config = PolicyLossConfig.model_validate({"type": "kl_cov", "covariance": {"share": share}})
    found = chosen(samples, HIGH_COVARIANCE, config)
    values = covariances(np.array(of_targets(samples, OLD_LOGPROB)), np.array(of_targets(samples, ADVANTAGE)))
    count = max(1, int(share * len(values)))
    assert sum(found) == count
    held = [value for value, one in zip(values, found, strict=True) if one]
    assert sorted(held, reverse=True) == sorted(values, reverse=True)[:count]


def test_clip_cov_holds_back_a_random_share_between_the_bounds() -> None:
    config = CovarianceConfig(share=0.1, low=1.0, high=5.0)
    generator = np.random.default_rng(0)
    values = generator.normal(scale=4.0, size=2_000)
    allowed = (values > 1.0) & (values < 5.0)
    keys = [generator.integers(0, 2**63, len(values), dtype=np.uint64) for _ in range(50)]
    counts = np.sum([covariant(values, one, config) for one in keys], axis=0)
    assert all(covariant(values, one, config).sum() == 200 for one in keys)
    assert (counts[~allowed] == 0).all() and allowed.sum() > 250
    assert np.count_nonzero(counts[allowed]) > 0.99 * allowed.sum(), "every token between the bounds may be chosen"
    assert not covariant(np.zeros(5), keys[0][:5], config).any()
    assert covariant(np.array([0.0, 2.0, 9.0]), keys[0][:3], config).tolist() == [False, True, False]


def test_a_random_choice_depends_on_seed_and_update_alone() -> None:
    config = PolicyLossConfig.model_validate(
        {"type": "clip_cov", "covariance": {"share": 0.1, "low": -9.0, "high": 9.0}}
    )
    first = chosen(make_samples(2), HIGH_COVARIANCE, config, seed=3, update=4)
    assert chosen(make_samples(2), HIGH_COVARIANCE, config, seed=3, update=4) == first and sum(first) == 4
    assert chosen(make_samples(2), HIGH_COVARIANCE, config, seed=3, update=5) != first
    assert chosen(make_samples(2), HIGH_COVARIANCE, config, seed=4, update=4) != first


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "dapo"])
def test_an_update_without_tokens_chooses_none(name: str) -> None:
    samples = make_samples(0, (0, 0))
    select_tokens(Minibatch(samples, []), PolicyLossConfig(type=name, top_entropy_share=0.2), seed=0, update=0)
    assert of_targets(samples, SELECTED) == [] and not samples[0].per_token[SELECTED].any()
