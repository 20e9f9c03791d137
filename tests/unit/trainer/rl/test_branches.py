"""Steps on rollouts with branches, each a sequence of its own, against transformers, however rows are packed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from holdfast.config.algorithm import UpdatesConfig
from holdfast.config.policy_losses import POLICY_LOSSES
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.protocol.rollouts import Batch, LossMask, Rewards, Rollout, Sampling, StepRewards, TokenIds, VersionSpan
from holdfast.trainer.data import packing
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.logprobs import Reading
from holdfast.trainer.model.packing_check import PACKED
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.rl.assign_advantages import assign_advantages
from holdfast.trainer.rl.auxiliary_models import RewardModel
from holdfast.trainer.rl.batch import VALUE, plan_epochs, to_samples
from holdfast.trainer.rl.losses import build_policy_loss
from holdfast.trainer.rl.metrics import PolicyStatistics
from holdfast.trainer.rl.train_step import forward_backward
from tests.builders.learner_runs import start_learner
from tests.builders.plain_models import write_reward_model
from tests.builders.policy_inputs import policy_input
from tests.builders.slow_losses import configured
from tests.builders.train_states import local_part
from tests.conftest import ModelFactory

# Tokens of each branch, by rollout: (prompt, sampled) of its turns, one after the other.
ROLLOUTS = ([[3, 4], [6, 2, 2, 5]], [[3, 2]], [[3, 2], [5, 2], [7, 6]])
COMMON = 5  # first tokens that the branches of a rollout share
TEMPERATURE = 0.8


def make_rollouts() -> list[Rollout]:
    """Rollouts of two, one and three branches, drawn at random, with log-probabilities around -4.5."""
    generator = np.random.default_rng(5)
    rollouts = []
    for index, branches in enumerate(ROLLOUTS):
        mask, starts = list[int](), list[int]()
        for stretches in branches:
            starts.append(len(mask))
            mask += [place % 2 for place, length in enumerate(stretches) for _ in range(length)]
        sampled, token_ids = np.array(mask), generator.integers(5, 100, len(mask))
        token_ids[:3] = 7, 8, 9
        for start in starts[1:]:
            token_ids[start : start + COMMON] = token_ids[:COMMON]
        rollout = Rollout(
            environment="e", task_id=0, sample_index=index,
            token_ids=TokenIds(token_ids.tolist()),
            loss_mask=LossMask(bytes(mask)), logprobs=(generator.uniform(-5, -4, len(mask)) * sampled).tolist(),
            versions=[VersionSpan(2, 0, len(mask))], reward=float((-1) ** index * (1 + index)),
            branch_starts=tuple(starts), sampling=Sampling(TEMPERATURE),
        )  # fmt: skip
        rollouts.append(rollout)
    return rollouts


def by_branch(model: torch.nn.Module, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies where tokens were sampled, each branch read by itself."""
    found, entropies = [], []
    for branch in rollout.branches:
        ids = torch.tensor([rollout.token_ids[branch].tolist()])
        all_TV = (model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        chosen = torch.tensor(rollout.loss_mask[branch].tolist()[1:], dtype=torch.bool)
        found.append(all_TV.gather(1, ids[0, 1:, None])[:, 0][chosen])
        entropies.append(-(all_TV.exp() * all_TV).sum(-1)[chosen])
    return torch.cat(found), torch.cat(entropies).detach()


def by_hand(directory: Path, rollouts: list[Rollout], config: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Some metrics, and the gradients, with every rollout as one sequence of the loss, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    parts, entropies = zip(*(by_branch(model, rollout) for rollout in rollouts), strict=True)
    sampled = [[p for p, used in zip(rollout.logprobs, rollout.loss_mask, strict=True) if used] for rollout in rollouts]
    counts = [len(part) for part in parts]
    new_N = torch.cat(parts)

    def each(values: list[float]) -> Tensor:
        return torch.tensor([value for value, count in zip(values, counts, strict=True) for _ in range(count)])

    data = policy_input(
        new_N, old_logprobs_N=new_N.detach(), sampler_logprobs_N=torch.tensor([p for own in sampled for p in own]),
        advantages_N=each([rollout.reward for rollout in rollouts]),
        weights_N=each([1 / len(counts) / count for count in counts]),
        sequence_N=each([float(number) for number in range(len(counts))]), step_sequences=len(counts),
        step_tokens=sum(counts),
    )  # fmt: skip
    loss, _ = build_policy_loss(config)(data)
    loss.backward()
    away_N = new_N.detach() - data.sampler_logprobs_N
    metrics = {
        "loss": loss.item(), "entropy": torch.cat(entropies).mean().item(),
        "mismatch_kl": (away_N.exp() - 1 - away_N).mean().item(),
        "mismatch/max_log_ratio": away_N.abs().max().item(),
    }  # fmt: skip
    return metrics, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(
    policy: Policy, rollouts: list[Rollout], mesh: Mesh, config: Any, *, row_tokens: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    samples = to_samples(rollouts, trained_version=3)
    assign_advantages(samples, [[rollout.reward] for rollout in rollouts])
    ((minibatch,),) = plan_epochs(
        samples, UpdatesConfig(), row_tokens=row_tokens, mesh=mesh, seed=0, step=4, layout=policy.layout
    )
    statistics = PolicyStatistics([1], has_reference=False)
    reading = Reading(Sampling(TEMPERATURE))
    loss = forward_backward(policy, minibatch, build_policy_loss(config), mesh, statistics, reading=reading)
    gradients = {n: local_part(p.grad).clone() for n, p in policy.hf_model.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    metrics = statistics.reduce(mesh)
    assert metrics["loss"] == pytest.approx(loss)
    return metrics, gradients


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "packed") for name in POLICY_LOSSES), ("grpo", "eager"), ("gspo", "eager")]
)
def test_loss_and_gradients_are_those_of_branches_alone(
    tiny_model: ModelFactory, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, name: str, attention: str
) -> None:
    """In one row and in several; a rollout counts once, by all its sampled tokens. First tokens are computed once."""
    rollouts, config, directory = make_rollouts(), configured(name), tiny_model()
    policy = build_policy(TrainedModelConfig(name=str(directory), attention=attention), mesh, seed=0)
    assert policy.layout.packs == (attention == "packed")
    expected_metrics, expected = by_hand(directory, rollouts, config)
    for row_tokens, short in ((1000, packing.SHORT), (1000, 2), (20, 2), (2, packing.SHORT)):
        monkeypatch.setattr(packing, "SHORT", short)
        metrics, gradients = step(policy, rollouts, mesh, config, row_tokens=row_tokens)
        assert {name: metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-4)
        for label, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[label], rtol=1e-3, atol=1e-6, msg=label)


def test_branches_that_do_not_fit_the_tokens_are_refused() -> None:
    for starts, message in {
        (): "begin at no token of 22",
        (1, 7): "begin at 1, 7 of 22",
        (0, 7, 7): "begin at 0, 7, 7 of 22",
        (0, 22): "each behind the one before",
        (0, 4): "a branch begins with a sampled token, which no prompt is before",
    }.items():
        rollout = make_rollouts()[0]
        rollout.branch_starts = starts
        with pytest.raises(DataError, match=f"rollout of e task 0 sample 0: .*{message}"):
            to_samples([rollout], trained_version=3)


def test_a_sample_that_is_cut_keeps_the_sequences_that_are_left() -> None:
    sample = to_samples(make_rollouts(), trained_version=3)[0]
    assert sample.starts == (0, 7) and sample.lengths == [7, 15]
    assert sample.cut(9).lengths == [7, 2] and sample.cut(7).lengths == [7] and sample.cut(0).starts == (0,)


def test_the_last_branch_is_scored(tiny_model: ModelFactory, mesh: Mesh, tmp_path: Path) -> None:
    write_reward_model(tmp_path, tiny_model("llama", tied=False))
    model = RewardModel(str(tmp_path), TrainedModelConfig(name=str(tiny_model())), mesh)
    samples = to_samples(make_rollouts(), trained_version=3)
    last = [Sample(s.token_ids[s.starts[-1] :], s.loss_mask[s.starts[-1] :]) for s in samples]
    for row_tokens in (2, 1000):
        assert model.score(samples, row_tokens=row_tokens) == model.score(last, row_tokens=row_tokens)


_learned: list[Any] = []


def reading_advantage(groups: Any) -> list[list[float]]:
    """An advantage of the user's: the reward. It notes what it was given."""
    _learned.extend(groups)
    return [[one.reward for one in group] for group in groups]


@pytest.mark.parametrize("settings", [
    {},
    {"advantage": "gae", "loss": {"type": "ppo"}, "critic": {}, "kl": {"coef": 0.1, "place": "reward"}},
    {"loss": {"type": "gspo"}, "kl": {}, "updates": {"epochs": 2, "minibatches": 2}},
    {"advantage": f"{__name__}:reading_advantage", "rewards": {"truncated": "mask"}},
], ids=["grpo", "gae", "gspo", "own"])  # fmt: skip
def test_a_step_takes_rollouts_with_branches_whatever_is_trained_and_measured(
    tiny_model: ModelFactory, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, settings: Any
) -> None:
    """What is measured in a branch is what is measured of it alone, and the metrics are finite."""
    run = start_learner(tmp_path, tiny_model(), mesh, tokenizer, **settings)
    rollouts = make_rollouts()
    places = TokenIds([6, 14, 21])
    rollouts[0].step_rewards = StepRewards(places, Rewards([0.5, 0.25, -1.0])) if "gae" in str(settings) else None
    rollouts[2].truncated = "truncated" in str(settings)
    batch = Batch(step=1, policy_version=0, weights_digest="d" * 32, rollouts=rollouts)
    _learned.clear()
    for number in (1, 2):
        batch.step = number
        metrics = run.learn_from(batch)
        assert all(map(math.isfinite, metrics.values())) and metrics["grad_norm"] > 0
    if run.parts.critic is not None:
        samples, alone = (to_samples(make_rollouts(), trained_version=1) for _ in range(2))
        own = [
            Sample(one.token_ids[start:end], one.loss_mask[start:end])
            for one in alone
            for start, end in zip(one.starts, [*one.starts[1:], len(one.token_ids)], strict=True)
        ]
        for measured in (samples, own):
            [[whole]] = plan_epochs(measured, UpdatesConfig(), row_tokens=30, mesh=mesh, seed=0, step=1, layout=PACKED)
            run.parts.critic.measure([whole])
        joined = np.concatenate([one.per_token[VALUE] for one in own])
        together = np.concatenate([one.per_token[VALUE] for one in samples])
        np.testing.assert_allclose(together, joined, rtol=1e-5, atol=1e-6)
    if _learned:
        assert [one.is_trained for one in _learned[0]] == [True, True, False]  # all branches of it or none
        assert [one.branch_starts for one in _learned[0]] == [(0, 7), (0,), (0, 5, 12)]
        assert [one.turns for one in _learned[0]] == [((0, 4), (4, 6), (6, 11)), ((0, 2),), ((0, 2), (2, 4), (4, 10))]
