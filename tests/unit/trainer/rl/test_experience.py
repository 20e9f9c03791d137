"""Rewards as they are shaped, advantages with penalties, critic or teacher."""

import json
import math
import random
import statistics

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.config.algorithm import CriticConfig
from holdfast.errors import DataError
from holdfast.protocol.rollouts import Rewards, Rollout, StepRewards, TokenIds
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl import assign_advantages as rl_assign_advantages
from holdfast.trainer.rl import batch as rl_batch
from holdfast.trainer.rl.advantages import generalized_advantages
from holdfast.trainer.rl.assign_advantages import advantage_metrics, assign_gae_advantages, whiten_advantages
from holdfast.trainer.rl.batch import ADVANTAGE, OLD_LOGPROB, REFERENCE_LOGPROB, RETURN, SAMPLER_LOGPROB, VALUE
from holdfast.trainer.rl.kl import KlPenalty, kl_of_sequences
from holdfast.trainer.rl.losses import value_loss
from holdfast.trainer.rl.metrics import explained_variance, value_sums
from holdfast.trainer.rl.rewards import RunningMoments, shape_rewards, soft_overlong_penalty
from holdfast.trainer.rl.token_rewards import Groups, attach_rewards
from tests.builders.slow_preferences import KL_ESTIMATES

REWARDS = [[1.0, 0.25, -0.5], [2.0, 2.5, 0.0]]
# The first token of a sample is never a target, nor are prompts and what lies between two turns.
MASKS = ("01111", "0011", "001101", "111", "0000000", "0001")


def masked(mask: str, **columns: np.ndarray) -> Sample:
    """A sample whose tokens are trained where the mask has a 1."""
    return Sample(np.arange(len(mask), dtype=np.int32), np.array([letter == "1" for letter in mask]), columns)


def make_samples() -> list[Sample]:
    generator = np.random.default_rng(1)
    columns = (OLD_LOGPROB, REFERENCE_LOGPROB, VALUE, SAMPLER_LOGPROB)
    drawn = [{name: generator.normal(size=len(mask)).astype(np.float32) for name in columns} for mask in MASKS]
    return [masked(mask, **own) for mask, own in zip(MASKS, drawn, strict=True)]


def make_rollouts(samples: list[Sample], *, truncated: tuple[int, ...] = ()) -> list[Rollout]:
    """The rollouts of the samples; `truncated`: which of them are."""
    return [
        Rollout(
            environment="e", task_id=number // 3, sample_index=number % 3, token_ids=sample.token_ids.tolist(),
            loss_mask=sample.loss_mask.tolist(), logprobs=[0.0] * len(sample.token_ids), versions=[],
            reward=0.5 * number, truncated=number in truncated, metrics={"exact": 1.0},
        )
        for number, sample in enumerate(samples)
    ]  # fmt: skip


def judge(samples: list[Sample], rewards: list[list[float]], penalty: KlPenalty | None = None) -> Groups:
    """Judge groups of as many samples as there are rewards."""
    rollouts = iter(make_rollouts(samples))
    return attach_rewards([[next(rollouts) for _ in rewards_G] for rewards_G in rewards], samples, rewards, penalty)


def trained_places(sample: Sample) -> list[int]:
    return [place for place in range(1, len(sample.token_ids)) if sample.loss_mask[place]]


def slow_penalties(sample: Sample, coef: float, estimator: str) -> dict[int, float]:
    """Place -> coef * estimate of the divergence there, token by token."""
    found = {}
    for place in trained_places(sample):
        d = float(sample.per_token[OLD_LOGPROB][place]) - float(sample.per_token[REFERENCE_LOGPROB][place])
        found[place] = coef * KL_ESTIMATES[estimator](d, 1.0)[0]
    return found


def test_the_divergence_of_a_sequence_is_the_sum_over_its_trained_tokens() -> None:
    samples = make_samples()
    expected = [sum(slow_penalties(sample, 1.0, "k1").values()) for sample in samples]
    assert kl_of_sequences(samples) == pytest.approx(expected, rel=1e-12) and expected[4] == 0.0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("masks", [MASKS, ("01", "00", "00"), ("00", "00", "00"), ("01", "01", "01")])
def test_the_critics_advantages_are_finite_whatever_there_is_to_whiten(scale: float, masks: tuple[str, ...]) -> None:
    columns = (VALUE, SAMPLER_LOGPROB)
    samples = [masked(mask, **{name: np.zeros(len(mask), dtype=np.float32) for name in columns}) for mask in masks]
    for rewards in ([scale * number for number in range(len(masks))], [scale] * len(masks)):
        assign_gae_advantages(samples, judge(samples, [rewards]), CriticConfig())
        whiten_advantages(samples)
        found = np.concatenate([sample.per_token[ADVANTAGE] for sample in samples])
        assert np.isfinite(found).all() and np.abs(found).max() <= max(scale, math.sqrt(len(found)))
    assert advantage_metrics(samples) or not any(sample.num_targets for sample in samples)


def test_the_metrics_of_advantages_count_trained_tokens_alone() -> None:
    samples = make_samples()[:2]
    for sample, value in zip(samples, (2.0, -4.0), strict=True):
        sample.per_token[ADVANTAGE] = np.full(len(sample.token_ids), value, dtype=np.float32)
        sample.per_token[ADVANTAGE][0] = 100.0
    # Four targets of 2 and two of -4: mean 0, squares 4 * 4 + 2 * 16 = 48.
    expected = {"advantage/mean": 0.0, "advantage/std": math.sqrt(8), "advantage/max_abs": 4.0}
    assert advantage_metrics(samples) == pytest.approx(expected)
    nothing = make_samples()[4]
    nothing.per_token[ADVANTAGE] = np.ones(len(nothing.token_ids), dtype=np.float32)
    assert advantage_metrics([nothing]) == {}


def test_what_a_teacher_did_not_judge_cannot_be_distilled() -> None:
    samples = make_samples()
    rl_assign_advantages.assign_advantages(samples, [[0.0] * len(samples)])
    del samples[2].per_token[REFERENCE_LOGPROB]
    with pytest.raises(DataError, match="needs the log-probabilities of a teacher, and the batch has none"):
        rl_assign_advantages.add_distillation(samples, 1.0)


def test_a_judged_rollout_holds_what_it_earned_token_by_token() -> None:
    samples = make_samples()
    judged = [one for group in judge(samples, REWARDS, KlPenalty(0.2, "k3")) for one in group]
    turns = [[(0, 4)], [(0, 2)], [(0, 2), (2, 3)], [(0, 2)], [], [(0, 1)]]
    for number, (one, sample) in enumerate(zip(judged, samples, strict=True)):
        places = trained_places(sample)
        assert one.places.tolist() == places and one.num_tokens == len(places) and list(one.turns) == turns[number]
        assert one.logprobs.tolist() == sample.per_token[SAMPLER_LOGPROB][places].tolist()
        assert one.token_ids.tolist() == sample.token_ids.tolist() and one.task_id == number // 3
        assert one.environment_reward == 0.5 * number and one.metrics == {"exact": 1.0}
        expected = [-penalty for penalty in slow_penalties(sample, 0.2, "k3").values()]
        if expected:
            expected[-1] += REWARDS[number // 3][number % 3]
            assert one.reward == pytest.approx(sum(expected))
        assert one.token_rewards.tolist() == pytest.approx(expected)
        with pytest.raises(ValueError, match="read-only"):
            one.token_rewards[:] = 0
        with pytest.raises(ValueError, match="read-only"):
            one.token_ids[:] = 0
    assert judged[4].reward == REWARDS[1][1]


def test_rewards_of_turns_and_tokens_are_earned_where_they_end() -> None:
    samples = make_samples()
    rollouts = make_rollouts(samples)
    rollouts[0].step_rewards = StepRewards(TokenIds([1, 2, 3, 4]), Rewards([1.0, 2.0, 3.0, 4.0]))  # of each token
    rollouts[2].step_rewards = StepRewards(TokenIds([3, 5]), Rewards([0.5, -2.0]))  # of its two turns
    groups = [rollouts[:3], rollouts[3:]]
    first, second, third, *_ = (one for g in attach_rewards(groups, samples, REWARDS, None) for one in g)
    assert (first.step_ends.tolist(), first.step_rewards.tolist()) == ([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    assert first.token_rewards.tolist() == [1.0, 2.0, 3.0, 5.0] and first.reward == 1.0
    assert (third.step_ends.tolist(), third.token_rewards.tolist()) == ([1, 2], [0.0, 0.5, -2.5])
    assert third.total_reward == -2.0 and second.total_reward == second.reward
    assert len(second.step_ends) == len(second.step_rewards) == 0
    # Without a critic's say, GAE with gamma and lambda 1 sums them from each token on.
    for sample in samples:
        sample.per_token[VALUE] = np.zeros(len(sample.token_ids), dtype=np.float32)
    assign_gae_advantages(samples, attach_rewards(groups, samples, REWARDS, None), CriticConfig(lam=1.0))
    assert samples[2].per_token[ADVANTAGE].tolist() == [0.0, 0.0, -2.0, -2.0, 0.0, -2.5]
    assert samples[0].per_token[RETURN].tolist() == [0.0, 11.0, 10.0, 8.0, 5.0]


@pytest.mark.parametrize(
    ("places", "rewards"), [([1], [1.0]), ([3, 3], [1.0, 1.0]), ([5, 3], [1.0, 1.0]), ([3], [1.0, 1.0]), ([9], [1.0])]
)
def test_rewards_of_steps_that_end_at_unsampled_tokens_are_refused(places: list[int], rewards: list[float]) -> None:
    samples = make_samples()[:3]
    rollouts = make_rollouts(samples)
    rollouts[2].step_rewards = StepRewards(TokenIds(places), Rewards(rewards))
    with pytest.raises(DataError, match="task 0 sample 2: its step_rewards are"):
        attach_rewards([rollouts], samples, REWARDS[:1], None)


def test_a_critics_advantages_are_whitened_over_the_trained_tokens_alone() -> None:
    samples = make_samples()
    trained = rl_batch.without_truncated(samples, make_rollouts(samples, truncated=(0, 3)))
    assert [one.num_targets for one in trained] == [0, 2, 3, 0, 0, 1]
    assert all(one.per_token is whole.per_token for one, whole in zip(trained, samples, strict=True))
    assign_gae_advantages(samples, judge(samples, REWARDS), CriticConfig())
    before = np.concatenate([one.per_token[ADVANTAGE][one.targets] for one in trained]).astype(np.float64)
    whiten_advantages(trained)
    after = np.concatenate([one.per_token[ADVANTAGE][one.targets] for one in trained])
    np.testing.assert_allclose(after, (before - before.mean()) / math.sqrt(before.var(ddof=1) + 1e-8), rtol=1e-5)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_long_sequences_of_float32_lose_no_digits_and_empty_ones_have_none() -> None:
    rewards, values = np.random.default_rng(0).standard_normal((2, 4000), dtype=np.float32)
    advantages, returns = generalized_advantages(rewards, values, gamma=1.0, lam=1.0)
    assert advantages.dtype == returns.dtype == np.float64
    assert returns[0] == pytest.approx(math.fsum(rewards.tolist()), abs=1e-10)
    advantages, returns = generalized_advantages(np.zeros(0), np.zeros(0), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (0,)
    with pytest.raises(ValueError, match="longer"):
        generalized_advantages(np.zeros(2), np.zeros(3), gamma=1.0, lam=1.0)


@pytest.mark.parametrize(("value", "old", "target", "loss", "gradient", "clipped"), [
    # clip 0.2: the larger of (V - R)^2 and (clip(V) - R)^2, half of it.
    (1.0, 1.0, 3.0, 2.0, -2.0, 0),  # not moved
    (1.1, 1.0, 3.0, 1.805, -1.9, 0),  # moved within the clip
    (1.5, 1.0, 3.0, 1.62, 0.0, 1),  # moved too far towards the target: (1.2 - 3)^2 / 2, no gradient
    (0.5, 1.0, 3.0, 3.125, -2.5, 0),  # moved too far from it: (0.5 - 3)^2 / 2, pulled back
    (-0.5, 0.0, -3.0, 3.92, 0.0, 1),  # the same downwards: (-0.2 + 3)^2 / 2
    (1.5, 1.0, 1.5, 0.045, 0.0, 1),  # on target, yet too far: (1.2 - 1.5)^2 / 2
])  # fmt: skip
def test_value_losses(value: float, old: float, target: float, loss: float, gradient: float, clipped: int) -> None:
    values = doubles(value).requires_grad_()
    got, counts = value_loss(values, doubles(old), doubles(target), doubles(1.0), clip=0.2)
    assert got.item() == pytest.approx(loss)
    assert torch.autograd.grad(got, values)[0].item() == pytest.approx(gradient)
    assert counts["value_clip_fraction"].item() == clipped


@pytest.mark.parametrize(("clip", "of_first", "clipped"), [(0.2, 1.62, 1), (math.inf, 1.125, 0)])
def test_value_loss_is_the_weighted_sum_and_counts_trained_tokens(clip: float, of_first: float, clipped: int) -> None:
    values, old, target = doubles(1.5, 1.5, 0.5), doubles(1, 1, 1), doubles(3, 3, 3)
    loss, counts = value_loss(values, old, target, doubles(0.5, 0.0, 0.25), clip=clip)
    assert loss.item() == pytest.approx(0.5 * of_first + 0.25 * 3.125)
    assert counts["value_clip_fraction"].item() == clipped


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
    expected = 1 - statistics.pvariance((returns - values).tolist()) / statistics.pvariance(returns.tolist())
    assert explained_variance(**total) == pytest.approx(expected) and 0.85 < expected < 1
    for equal in ((), (0.0, 0.0), (0.7, 0.7, 0.7), (1e6 / 3,) * 11):
        values = doubles(*range(len(equal)))
        assert math.isnan(explained_variance(**sums(doubles(*equal), values))), "nothing to explain"


@pytest.mark.parametrize(("buffer", "penalties"), [
    (40, {0: 0.0, 60: 0.0, 61: -0.025, 80: -0.5, 99: -0.975, 100: -1.0, 500: -1.0}), (0, {100: 0.0, 101: -1.0}),
])  # fmt: skip
def test_the_length_penalty_falls_linearly_over_the_buffer(buffer: int, penalties: dict[int, float]) -> None:
    found = {tokens: soft_overlong_penalty(tokens, max_tokens=100, buffer_tokens=buffer) for tokens in penalties}
    assert found == pytest.approx(penalties, abs=1e-15)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6 / 3])
def test_rewards_without_any_spread_stay_as_they_are(reward: float) -> None:
    moments = RunningMoments()
    for _ in range(3):
        assert shape_rewards([[reward] * 3, [reward]], moments=moments) == [[reward] * 3, [reward]]
    assert shape_rewards([[reward]], moments=RunningMoments()) == [[reward]]


def test_penalty_comes_before_clip_before_moments_before_scale() -> None:
    moments = RunningMoments()
    rewards, penalties = [[1.0, 9.0], [3.0, -9.0]], [[-0.5, -2.0], [0.0, -1.0]]
    # With penalties .5, 7, 3, -10; clipped to 4: .5, 4, 3, -4: mean .875,
    # squares .140625 + 9.765625 + 4.515625 + 23.765625 = 38.1875, sample variance 12.729167.
    got = shape_rewards(rewards, penalties_PG=penalties, clip=4.0, moments=moments)
    std = math.sqrt(38.1875 / 3)
    assert (moments.mean, moments.count) == pytest.approx((0.875, 4.0)) and moments.std == pytest.approx(std)
    assert [pytest.approx(group) for group in got] == [[0.5 / std, 4 / std], [3 / std, -4 / std]]
    assert rewards == [[1.0, 9.0], [3.0, -9.0]]


def test_nothing_asked_for_changes_nothing_and_penalties_must_fit_the_rewards() -> None:
    rewards = [[1.0, 2.0], [3.0]]
    got = shape_rewards(rewards)
    assert got == rewards and got[0] is not rewards[0]
    assert shape_rewards([], clip=1.0, moments=RunningMoments()) == []
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


def test_the_order_within_a_batch_changes_no_bit() -> None:
    generator = random.Random(1)
    rewards = [generator.gauss(0, 10 ** generator.uniform(-8, 8)) for _ in range(100)]
    one, other = RunningMoments(), RunningMoments()
    one.update(rewards)
    other.update(sorted(rewards))
    assert one.values() == other.values()
