"""Length penalty, clip and scale of rewards by hand, their order, and the moments behind the scale."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from holdfast.trainer.rl.rewards import RunningMoments, shape_rewards, soft_overlong_penalty


@pytest.mark.parametrize(
    ("buffer", "penalties"),
    [
        (40, {0: 0.0, 60: 0.0, 61: -0.025, 80: -0.5, 99: -0.975, 100: -1.0, 500: -1.0}),
        (0, {100: 0.0, 101: -1.0}),
    ],
)
def test_the_length_penalty_falls_linearly_over_the_buffer(buffer: int, penalties: dict[int, float]) -> None:
    found = {tokens: soft_overlong_penalty(tokens, max_tokens=100, buffer_tokens=buffer) for tokens in penalties}
    assert found == pytest.approx(penalties, abs=1e-15)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6 / 3])
def test_rewards_without_any_spread_stay_as_they_are(reward: float) -> None:
    moments = RunningMoments()
    for _ in range(3):
        assert shape_rewards([[reward] * 3, [reward]], moments=moments) == [[reward] * 3, [reward]]
    one = RunningMoments()
    assert shape_rewards([[reward]], moments=one) == [[reward]]


def test_penalty_comes_before_clip_before_moments_before_scale() -> None:
    moments = RunningMoments()
    rewards, penalties = [[1.0, 9.0], [3.0, -9.0]], [[-0.5, -2.0], [0.0, -1.0]]
    # With penalties .5, 7, 3, -10; clipped to 4: .5, 4, 3, -4: mean .875,
    # squares .140625 + 9.765625 + 4.515625 + 23.765625 = 38.1875, sample variance 12.729167.
    got = shape_rewards(rewards, penalties_PG=penalties, clip=4.0, moments=moments)
    std = math.sqrt(38.1875 / 3)
    assert (moments.mean, moments.count) == pytest.approx((0.875, 4.0))
    assert moments.std == pytest.approx(std)
    assert [pytest.approx(group) for group in got] == [[0.5 / std, 4 / std], [3 / std, -4 / std]]
    assert rewards == [[1.0, 9.0], [3.0, -9.0]]


def test_nothing_asked_for_changes_nothing() -> None:
    rewards = [[1.0, 2.0], [3.0]]
    got = shape_rewards(rewards)
    assert got == rewards and got[0] is not rewards[0]
    assert shape_rewards([], clip=1.0, moments=RunningMoments()) == []


def test_penalties_that_do_not_fit_the_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        shape_rewards([[1.0, 2.0]], penalties_PG=[[0.0]])


def test_the_scale_is_that_of_every_batch_so_far_and_survives_a_checkpoint() -> None:
    generator = random.Random(0)
    batches = [[[generator.gauss(2, 3) for _ in range(4)] for _ in range(5)] for _ in range(6)]
    straight, resumed = RunningMoments(), RunningMoments()
    seen: list[float] = []
    for batch in batches:
        seen += [reward for group in batch for reward in group]
        got = shape_rewards(batch, moments=straight)
        restarted = RunningMoments()
        restarted.restore(json.loads(json.dumps(resumed.values())))
        resumed = restarted
        assert shape_rewards(batch, moments=resumed) == got
        std = statistics.stdev(seen)
        assert [pytest.approx(group, rel=1e-12) for group in got] == [[r / std for r in group] for group in batch]


def test_replayed_rewards_are_scaled_but_never_counted_again() -> None:
    moments, alone = RunningMoments(), RunningMoments()
    rewards = [[1.0, 3.0], [2.0, 6.0], [4.0, 4.0]]
    got = shape_rewards(rewards, moments=moments, num_new=2)
    shape_rewards(rewards[:2], moments=alone)
    assert moments.values() == alone.values() and moments.count == pytest.approx(4.0)
    assert got[2] == [4.0 / moments.std, 4.0 / moments.std]


def moments_of(*batches: list[float]) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    return moments


def test_the_order_within_a_batch_changes_no_bit() -> None:
    generator = random.Random(1)
    rewards = [generator.gauss(0, 10 ** generator.uniform(-8, 8)) for _ in range(100)]
    assert moments_of(rewards).values() == moments_of(sorted(rewards)).values()
