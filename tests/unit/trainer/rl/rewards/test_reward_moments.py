"""Running moments against values worked out by hand, and against one pass over everything."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from holdfast.trainer.rl.rewards.running_moments import RunningMoments


def moments_of(*batches: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    return moments


def test_batches_add_up_to_one_pass_over_all_rewards() -> None:
    generator = random.Random(0)
    rewards = [generator.gauss(5, 3) for _ in range(500)]
    cuts = [0, 1, 2, 40, 41, 300, 500]
    moments = moments_of(*(rewards[begin:end] for begin, end in itertools.pairwise(cuts)))
    assert moments.mean == pytest.approx(statistics.fmean(rewards), rel=1e-13)
    assert moments.var == pytest.approx(statistics.pvariance(rewards), rel=1e-13)
    assert moments.std == pytest.approx(statistics.stdev(rewards), rel=1e-13)


def test_the_order_within_a_batch_changes_no_bit() -> None:
    generator = random.Random(1)
    rewards = [generator.gauss(0, 10 ** generator.uniform(-8, 8)) for _ in range(100)]
    assert moments_of(rewards).values() == moments_of(sorted(rewards)).values()


def test_fewer_than_two_rewards_have_a_spread_of_one() -> None:
    assert moments_of().std == 1.0
    one = moments_of([7.0])
    assert one.std == 1.0 and one.mean == 7.0 and one.var == pytest.approx(0.0, abs=1e-20)
