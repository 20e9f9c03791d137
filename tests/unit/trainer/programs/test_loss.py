"""Cross-entropy and k3 against values worked out by hand, and rollouts as samples."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import DataError
from holdfast.protocol.rollouts import Rollout, VersionSpan
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.rl.advantages import assign_advantages
from holdfast.trainer.rl.batch import ADVANTAGE, AGE, SAMPLER_LOGPROB, to_samples
from holdfast.trainer.rl.kl import k3
from holdfast.trainer.supervised import cross_entropy


def test_cross_entropy_is_the_weighted_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.25])
    loss = cross_entropy(logprobs, weights)
    assert loss.item() == pytest.approx(2.0)
    assert torch.equal(torch.autograd.grad(loss, logprobs)[0], -weights)


def test_k3_is_zero_at_equality_never_negative_and_exact_near_it() -> None:
    assert k3(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    d = torch.linspace(-5, 5, 1001)
    assert (k3(d) >= 0).all()
    tiny = torch.tensor([1e-7, -1e-7], dtype=torch.float64)  # where exp(d) - 1 has but nine digits left
    assert k3(tiny).tolist() == pytest.approx([5e-15, 5e-15], rel=1e-6)


def rollout(length: int, sampled: int, *, index: int = 0) -> Rollout:
    prompt = length - sampled
    return Rollout(
        environment="e", task_id=0, sample_index=index, token_ids=list(range(5, 5 + length)),
        loss_mask=[False] * prompt + [True] * sampled, logprobs=[0.0] * prompt + [-0.5 - k for k in range(sampled)],
        versions=[VersionSpan(2, prompt, length - 1), VersionSpan(3, length - 1, length)],
    )  # fmt: skip


def samples_of(*rollouts: Rollout) -> list[Sample]:
    return to_samples(rollouts, trained_version=3)


def test_rollouts_become_samples_token_by_token() -> None:
    (sample,) = samples_of(rollout(5, 3))
    assign_advantages([sample], [[-1.5]])
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9] and sample.num_targets == 3
    assert sample.per_token[SAMPLER_LOGPROB].tolist() == [0.0, 0.0, -0.5, -1.5, -2.5]
    assert sample.per_token[ADVANTAGE][sample.loss_mask].tolist() == [-1.5] * 3
    assert sample.per_token[AGE][sample.loss_mask].tolist() == [1.0, 1.0, 0.0]
    micro = build_micro_batch([sample], [0], pack=True, device=torch.device("cpu"))
    assert micro.target_ids_N.tolist() == [7, 8, 9] and micro.predict_index_N.tolist() == [1, 2, 3]
    assert micro.per_token[SAMPLER_LOGPROB].tolist() == [-0.5, -1.5, -2.5]


def test_a_rollout_that_sampled_nothing_trains_nothing() -> None:
    (sample, _) = samples_of(rollout(3, 0), rollout(3, 2, index=1))
    assert sample.num_targets == 0


@pytest.mark.parametrize("name", ["loss_mask", "logprobs"])
def test_a_rollout_whose_arrays_do_not_fit_is_refused(name: str) -> None:
    broken = rollout(5, 3)
    getattr(broken, name).pop()
    with pytest.raises(DataError, match="sample 0: 5 tokens"):
        samples_of(broken)
