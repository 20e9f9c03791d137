"""One RL step through the policy: loss, gradients and statistics against transformers, however it is packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.config.algorithm import PolicyLossConfig, UpdatesConfig
from holdfast.config.base import POLICY_LOSSES
from holdfast.config.training import TrainedModelConfig
from holdfast.protocol.rollouts import Batch, Rollout, Sampling, VersionSpan
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.logprobs import Reading
from holdfast.trainer.model.packing_check import PACKED
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.rl.advantages import assign_advantages
from holdfast.trainer.rl.batch import AGE, plan_epochs, to_samples
from holdfast.trainer.rl.losses import build_policy_loss
from holdfast.trainer.rl.metrics import PolicyStatistics
from holdfast.trainer.rl.train_step import policy_step
from tests.builders.slow_losses import configured
from tests.builders.train_states import local_part

TEMPERATURE = 0.8
SHIFT = 0.1
CLIP = PolicyLossConfig(type="grpo", clip_low=0.05, clip_high=0.05)


@pytest.fixture(scope="module")
def directory(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def policy(directory: Path, mesh: Mesh) -> Policy:
    return build_policy(TrainedModelConfig(name=str(directory)), mesh, seed=0)


def reference_logprobs(directory: Path, rollout: Rollout) -> tuple[Tensor, Tensor, torch.nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    all_logprobs = (model(torch.tensor([rollout.token_ids])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    chosen = torch.tensor(rollout.loss_mask[1:])
    taken = all_logprobs.gather(1, torch.tensor(rollout.token_ids[1:])[:, None])[:, 0][chosen]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)[chosen]
    return taken, entropy, model


def make_batch(directory: Path, *, shift: float) -> Batch:
    """Rollouts whose sampler log-probs lie `shift` above (first half of each) and below the trainer's own."""
    generator = np.random.default_rng(0)
    rollouts = []
    for index, (prompt, sampled) in enumerate(((3, 6), (2, 1), (5, 4), (1, 9))):
        rollout = Rollout(
            environment="e", task_id=index, sample_index=0,
            token_ids=generator.integers(5, 100, prompt + sampled).tolist(),
            loss_mask=[False] * prompt + [True] * sampled, logprobs=[0.0] * (prompt + sampled),
            versions=[VersionSpan(version=3 - index % 2, start=prompt, end=prompt + sampled)],
            reward=float((-1) ** index * (1 + index)), sampling=Sampling(TEMPERATURE),
        )  # fmt: skip
        with torch.no_grad():
            own, _, _ = reference_logprobs(directory, rollout)
        signs = np.where(np.arange(sampled) < sampled / 2, 1.0, -1.0)
        rollout.logprobs[prompt:] = (own.numpy() + shift * signs).tolist()
        rollouts.append(rollout)
    return Batch(step=4, policy_version=2, weights_digest="d" * 32, rollouts=rollouts)


def step(
    policy: Policy, batch: Batch, mesh: Mesh, *, row_tokens: int, config: PolicyLossConfig = CLIP
) -> tuple[dict[str, float], dict[str, Tensor]]:
    samples = to_samples(batch.rollouts, trained_version=3)
    assign_advantages(samples, [[rollout.reward] for rollout in batch.rollouts])
    ages = sorted({int(age) for sample in samples for age in sample.per_token[AGE][sample.targets]})
    statistics = PolicyStatistics(ages, has_reference=False)
    ((minibatch,),) = plan_epochs(
        samples, UpdatesConfig(), row_tokens=row_tokens, mesh=mesh, seed=0, step=4, layout=PACKED
    )
    loss = policy_step(
        policy, minibatch, build_policy_loss(config), mesh, statistics, reading=Reading(Sampling(TEMPERATURE))
    )
    metrics = statistics.reduce(mesh)
    assert metrics["loss"] == pytest.approx(loss)
    gradients = {n: local_part(p.grad).clone() for n, p in policy.hf_model.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return metrics, gradients


def test_loss_gradients_and_entropy_are_those_of_transformers(policy: Policy, directory: Path, mesh: Mesh) -> None:
    batch = make_batch(directory, shift=SHIFT)
    metrics, gradients = step(policy, batch, mesh, row_tokens=64)
    loss, entropies, expected = 0.0, [], dict.fromkeys(gradients, torch.zeros(()))
    for rollout in batch.rollouts:
        own, entropy, model = reference_logprobs(directory, rollout)
        sampler = torch.tensor([p for p, used in zip(rollout.logprobs, rollout.loss_mask, strict=True) if used])
        ratio, advantage = (own - sampler).exp(), rollout.reward
        clipped = ratio.clamp(0.95, 1.05)
        part = -torch.minimum(ratio * advantage, clipped * advantage).mean() / len(batch.rollouts)
        part.backward()
        loss += part.item()
        entropies.append(entropy.detach())
        expected = {name: expected[name] + p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_packing_changes_nothing(policy: Policy, directory: Path, mesh: Mesh, name: str) -> None:
    batch = make_batch(directory, shift=SHIFT)
    config = configured(name, correction={"type": "truncate", "level": "sequence", "high": 1.05})
    together, gradients = step(policy, batch, mesh, row_tokens=1000, config=config)
    apart, gradients_apart = step(policy, batch, mesh, row_tokens=2, config=config)
    assert apart == pytest.approx(together, rel=1e-4, abs=1e-6)
    # Half of a sequence's tokens lie above the sampler; an odd one out makes the product exp(-SHIFT).
    assert together["correction/bounded"] == 0.0
    for label, gradient in gradients.items():
        torch.testing.assert_close(gradients_apart[label], gradient, rtol=1e-3, atol=1e-6, msg=label)


def test_mismatch_is_measured_per_token_and_by_age(policy: Policy, directory: Path, mesh: Mesh) -> None:
    metrics, _ = step(policy, make_batch(directory, shift=SHIFT), mesh, row_tokens=64)
    low, high = np.expm1(-SHIFT) + SHIFT, np.expm1(SHIFT) - SHIFT  # k3 where the sampler was above, below
    above, below = (3 + 1 + 2 + 5), (3 + 0 + 2 + 4)
    assert metrics["mismatch_kl"] == pytest.approx((above * low + below * high) / 20, rel=1e-2)
    assert metrics["mismatch_kl/age_0"] == pytest.approx((5 * low + 5 * high) / 10, rel=1e-2)
    assert metrics["mismatch_kl/age_1"] == pytest.approx((6 * low + 4 * high) / 10, rel=1e-2)
    assert metrics["mismatch/max_log_ratio"] == pytest.approx(SHIFT, rel=1e-2)
    # Above the sampler (ratio up) with a positive advantage, below it with a negative one.
    assert metrics["clip_fraction/high"] == pytest.approx((3 + 2) / 20)
    assert metrics["clip_fraction/low"] == pytest.approx((1 + 5) / 20)
    assert metrics["clip_fraction"] == pytest.approx(11 / 20)


def test_the_trainers_own_samples_have_no_mismatch(policy: Policy, directory: Path, mesh: Mesh) -> None:
    metrics, _ = step(policy, make_batch(directory, shift=0.0), mesh, row_tokens=64)
    assert metrics["mismatch_kl"] < 1e-9 and metrics["mismatch/max_log_ratio"] < 1e-4
    assert metrics["clip_fraction"] == 0
