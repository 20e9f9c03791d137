"""PPO's pieces against what TRL's PPOTrainer computes while it trains a real policy and a real critic.

Shape legend: B sequences, T tokens of the longest one, N all their tokens.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from holdfast.config.algorithm import PolicyLossConfig
from holdfast.trainer.rl.gae import generalized_advantages, value_loss
from holdfast.trainer.rl.kl import estimate_kl
from holdfast.trainer.rl.losses import build_policy_loss
from tests.builders.policy_inputs import policy_input
from tests.conftest import ModelFactory

if TYPE_CHECKING:
    from tests.crosscheck.trl_trainers import PpoUpdate

pytestmark = pytest.mark.trl

GAMMA, LAM, KL_COEF, VALUE_COEF, CLIP = 0.97, 0.9, 0.07, 0.3, 0.2
CLOSE = {"rtol": 1e-7, "atol": 1e-12}


@pytest.fixture(scope="module")
def updates(
    trl_trainers: ModuleType, tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory
) -> list[PpoUpdate]:
    """Four updates on one batch: the first where nothing has changed, the later ones where clips bind."""
    return trl_trainers.ppo_updates(
        tiny_model(),
        tiny_model(seed=1),
        tmp_path_factory.mktemp("ppo"),
        num_sequences=8,
        num_ppo_epochs=4,
        response_length=40,
        learning_rate=1e-2,
        gamma=GAMMA,
        lam=LAM,
        kl_coef=KL_COEF,
        vf_coef=VALUE_COEF,
        cliprange=CLIP,
        cliprange_value=CLIP,
    )


def test_the_rollouts_have_several_lengths(updates: list[PpoUpdate]) -> None:
    lengths = set(updates[0].tokens_BT.sum(1).tolist())
    assert len(lengths) > 1 and 40 in lengths


def test_the_kl_penalty_is_k1_per_token_and_the_score_comes_behind_it(updates: list[PpoUpdate]) -> None:
    """TRL puts the score of an answer that ended on the position behind its last token."""
    update = updates[0]
    expected_BT = -KL_COEF * estimate_kl(update.old_logprobs_BT, update.reference_logprobs_BT, "k1")
    last_B = update.valued_BT.sum(1) - 1
    expected_BT[torch.arange(len(last_B)), last_B] += update.scores_B
    torch.testing.assert_close(update.rewards_BT, expected_BT, **CLOSE)


def test_advantages_and_returns_are_those_of_trl(updates: list[PpoUpdate]) -> None:
    """An answer that ended has a position more in TRL; ours gets it as a token."""
    update = updates[0]
    for row, length in enumerate(update.valued_BT.sum(1).tolist()):
        values_T = update.old_values_BT[row, :length]
        advantages_T, returns_T = generalized_advantages(
            update.rewards_BT[row, :length], values_T, gamma=GAMMA, lam=LAM
        )
        torch.testing.assert_close(returns_T, update.returns_BT[row, :length], **CLOSE)
        torch.testing.assert_close(advantages_T, update.returns_BT[row, :length] - values_T, **CLOSE)


def test_the_policy_loss_is_that_of_trl(updates: list[PpoUpdate]) -> None:
    clipped = build_policy_loss(PolicyLossConfig(type="ppo", clip_low=CLIP, clip_high=CLIP))
    num_clipped = 0
    for update in updates:
        lengths_B = update.tokens_BT.sum(1)
        logprobs_N = update.new_logprobs_BT[update.tokens_BT].requires_grad_()
        old_N = update.old_logprobs_BT[update.tokens_BT]
        data = policy_input(
            logprobs_N,
            old_logprobs_N=old_N,
            sampler_logprobs_N=old_N,
            advantages_N=update.whitened_advantages_BT[update.tokens_BT],
            weights_N=torch.zeros_like(old_N),  # for other denominators
            sequence_N=torch.arange(len(lengths_B)).repeat_interleave(lengths_B),
            step_sequences=len(lengths_B),
            step_tokens=int(lengths_B.sum()),
        )
        loss, counts = clipped(data)
        torch.testing.assert_close(loss, update.build_policy_loss, **CLOSE)
        (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        torch.testing.assert_close(gradient_N, update.new_logprobs_gradient_BT[update.tokens_BT], **CLOSE)
        num_clipped += int(counts["clip_fraction/low"] + counts["clip_fraction/high"])
    assert num_clipped > 0


def test_the_value_loss_is_that_of_trl(updates: list[PpoUpdate]) -> None:
    num_clipped = 0
    for update in updates:
        at = update.valued_BT
        values_N = update.new_values_BT[at].requires_grad_()
        weights_N = torch.full_like(values_N, 1 / int(at.sum()), requires_grad=False)
        loss, counts = value_loss(values_N, update.old_values_BT[at], update.returns_BT[at], weights_N, clip=CLIP)
        torch.testing.assert_close(loss, update.value_loss, **CLOSE)
        torch.testing.assert_close(update.loss, update.build_policy_loss + VALUE_COEF * loss.detach(), **CLOSE)
        (gradient_N,) = torch.autograd.grad(VALUE_COEF * loss, values_N)
        torch.testing.assert_close(gradient_N, update.new_values_gradient_BT[at], **CLOSE)
        share = counts["value_clip_fraction"] / int(at.sum())
        assert share.item() == pytest.approx(update.value_clip_fraction.item(), rel=1e-6)
        num_clipped += int(counts["value_clip_fraction"])
    assert num_clipped > 0
