"""Online DPO: its advantages give the gradient of DPO's loss of the best and the worst rollout."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.preference import PreferenceLossConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.trainer.preference.losses import PairLogprobs, build_preference_loss
from holdfast.trainer.rl.advantages import online_dpo
from holdfast.trainer.rl.scored_rollouts import ScoredRollout
from tests.builders.advantage_settings import NEEDED
from tests.builders.scored_rollouts import scored_rollout


def rollout(reward: float, log_ratio: float, num_tokens: int = 1) -> ScoredRollout:
    old = np.full(num_tokens, log_ratio / max(1, num_tokens))
    return scored_rollout(reward, num_tokens, old_logprobs=old, reference_logprobs=np.zeros(num_tokens))


def test_equal_rewards_make_no_pair_and_the_first_of_equal_ones_is_taken() -> None:
    groups = [[rollout(0.3, 1.0), rollout(0.3, -1.0)], [rollout(0.3, 1.0)], [rollout(r, 0.0) for r in (1, 0, 1, 0)]]
    assert online_dpo(groups, beta=0.1) == [
        [0.0, 0.0],
        [0.0],
        [pytest.approx(7 / 3 * 0.1 / 2), pytest.approx(-7 / 3 * 0.1 / 2), 0.0, 0.0],
    ]


@pytest.mark.parametrize("log_ratio", [20.0, 1e4, -1e4])
def test_nothing_overflows(log_ratio: float) -> None:
    ((best, worst),) = online_dpo([[rollout(1.0, log_ratio), rollout(0.0, -log_ratio)]], beta=0.1)
    assert best == -worst == pytest.approx(2 * 0.1 / (1 + np.exp(np.float128(0.2 * log_ratio))))


@pytest.mark.parametrize("seed", range(20))
def test_the_gradient_is_that_of_dpo_over_the_problems(seed: int) -> None:
    """Ragged answers, groups of one to five, some of equal rewards, against the loss that `dpo` trains with."""
    draw = random.Random(seed)
    beta, groups, leaves = 0.1 + draw.random(), [], []
    dpo, loss = build_preference_loss(PreferenceLossConfig(type="dpo", beta=beta)), torch.zeros((), dtype=torch.float64)
    num_problems = draw.randint(1, 4)
    for _ in range(num_problems):
        size = draw.randint(1, 5)
        rewards = [0.5] * size if draw.random() < 0.3 else [float(draw.randint(0, 2)) for _ in range(size)]
        answers = [torch.randn(draw.randint(1, 6), dtype=torch.float64, requires_grad=True) for _ in range(size)]
        references = [torch.randn(len(answer), dtype=torch.float64) for answer in answers]
        groups.append(
            [
                scored_rollout(reward, len(new), old_logprobs=new.detach().numpy(), reference_logprobs=of.numpy())
                for reward, new, of in zip(rewards, answers, references, strict=True)
            ]
        )
        leaves.append(answers)
        if max(rewards) > min(rewards):
            chosen, rejected = rewards.index(max(rewards)), rewards.index(min(rewards))
            sums = [values[side].sum()[None] for values in (answers, references) for side in (chosen, rejected)]
            counts = [torch.tensor([len(answers[side])]) for side in (chosen, rejected)]
            loss = loss + dpo(PairLogprobs(*sums, *counts, torch.zeros(1))).losses_P.sum() / num_problems

    by_advantage = torch.zeros((), dtype=torch.float64)
    for advantages, answers in zip(online_dpo(groups, beta=beta), leaves, strict=True):
        for advantage, answer in zip(advantages, answers, strict=True):
            by_advantage = by_advantage - advantage * answer.sum() / sum(map(len, groups))
    everything = [answer for answers in leaves for answer in answers]
    found = torch.autograd.grad(by_advantage, everything)
    none = [None] * len(everything)
    wanted = torch.autograd.grad(loss, everything, allow_unused=True) if loss.requires_grad else none
    for own, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, torch.zeros_like(own) if want is None else want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": None}, "compares with a reference: set kl"),
        ({"loss": {"type": "policy_gradient"}}, "with this policy loss alone"),
        ({"loss": NEEDED["online_dpo"]["loss"] | {"constant_tokens": 8}}, "with this policy loss alone"),
        ({"updates": {"epochs": 2}}, "does not go with updates of more than one"),
        ({"kl": {"coef": 0.1}}, "does not go with kl.coef above 0"),
        ({"rewards": {"truncated": "mask"}}, "does not go with rewards.truncated"),
        ({"advantage": "grpo", "advantage_beta": 0.1}, "advantage_beta is the beta of advantage = 'online_dpo'"),
    ],
)
def test_what_would_be_another_gradient_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig.model_validate({"advantage": "online_dpo"} | NEEDED["online_dpo"] | settings)
