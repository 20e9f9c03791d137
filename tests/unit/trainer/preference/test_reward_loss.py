"""The loss of a reward model against values worked out by hand, the formula and finite differences; a whole step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.config import RewardTrainingConfig
from holdfast.config.preference import RewardLossConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.value_model import ScalarModel, build_scalar_model
from holdfast.trainer.preference.losses import reward_loss
from holdfast.trainer.preference.pairs import Pair
from holdfast.trainer.programs.reward_model import end_at_stop_token, reward_objective
from tests.builders.preference_steps import check_splits, ragged_pairs, taken_gradients

SETTINGS = [RewardLossConfig(), RewardLossConfig(center_coef=0.1)]


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_loss_is_the_formula_and_its_gradient_finite_differences(settings: RewardLossConfig) -> None:
    chosen_P, rejected_P = doubles(1.5, -0.4, 0.0).requires_grad_(), doubles(0.2, 1.0, -3.0).requires_grad_()
    margins_P = doubles(0.0, 1 / 3, 1.5)
    losses_P = reward_loss(chosen_P, rejected_P, margins_P, settings)
    slow = [
        -math.log(1 / (1 + math.exp(-(w - l - margin)))) + settings.center_coef * (w + l) ** 2
        for w, l, margin in zip(chosen_P.tolist(), rejected_P.tolist(), margins_P.tolist(), strict=True)  # noqa: E741
    ]
    assert losses_P.tolist() == pytest.approx(slow, rel=1e-10)
    torch.autograd.gradcheck(lambda w, l: reward_loss(w, l, margins_P, settings), (chosen_P, rejected_P))  # noqa: E741


def test_very_wrong_pairs_have_a_finite_loss_and_gradient() -> None:
    chosen_P = doubles(-1e4).requires_grad_()
    loss_P = reward_loss(chosen_P, doubles(1e4), doubles(0.0), RewardLossConfig())
    loss_P.sum().backward()
    assert loss_P.item() == pytest.approx(2e4) and chosen_P.grad is not None and chosen_P.grad.item() == -1


@pytest.mark.parametrize(
    "settings",
    [{"loss": {"center_coef": -0.1}}, {"val_interval": 3}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"center_coef|val_interval"):
        RewardTrainingConfig.model_validate(settings)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], mesh: Mesh) -> ScalarModel:
    return build_scalar_model(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)


def test_sides_end_with_the_stop_token_as_sampled_answers_do(tokenizer: PreTrainedTokenizerBase) -> None:
    """Whatever white space a chat template puts behind it; text behind it stays, and so does a prompt's stop token."""
    stop = tokenizer.eos_token_id
    text, space = tokenizer("ab")["input_ids"], tokenizer(" ")["input_ids"]

    def shortened(*answer: int) -> list[int]:
        ids = np.asarray([*text, stop, *answer], dtype=np.int32)
        side = Sample(ids, np.arange(len(ids)) > len(text))
        pair = end_at_stop_token(Pair(side, side, number=3), tokenizer)
        assert pair.number == 3 and all(len(s.token_ids) == len(s.loss_mask) for s in pair.sides)
        return pair.rejected.token_ids.tolist()[len(text) + 1 :]

    assert shortened(*text, stop, *space) == [*text, stop]
    assert shortened(*text, stop, *space, stop, *space, *space) == [*text, stop, *space, stop]
    assert shortened(*text, stop) == [*text, stop]
    assert shortened(*text, stop, *text) == [*text, stop, *text]
    assert shortened(*text, *space) == [*text, *space]


def step_of(model: ScalarModel, mesh: Mesh, pairs: list[Pair], **data: Any) -> tuple[dict[str, float], Tensor]:
    config = RewardTrainingConfig.model_validate({"data": {"seq_len": 16, **data}, "loss": {"center_coef": 0.05}})
    metrics = reward_objective(config, mesh).accumulate_gradients(model, pairs)
    return metrics, taken_gradients(model)


def test_a_step_is_what_transformers_and_the_formula_give(model: ScalarModel, mesh: Mesh) -> None:
    pairs = ragged_pairs(5, margin=0.3)
    metrics, got = step_of(model, mesh, pairs)
    rewards_P2 = torch.stack([
        torch.stack([model.hf_model(torch.from_numpy(side.token_ids)[None].long()).logits[0, 0] for side in pair.sides])
        for pair in pairs
    ]).double()  # fmt: skip
    w_P, l_P = rewards_P2.unbind(1)
    margins_P = 0.3 * torch.arange(5)
    loss = (torch.log(1 + torch.exp(-(w_P - l_P - margins_P))) + 0.05 * (w_P + l_P) ** 2).mean()
    loss.backward()
    torch.testing.assert_close(got, taken_gradients(model), rtol=1e-4, atol=1e-6)
    rewards_P2, w_P, l_P = rewards_P2.detach(), w_P.detach(), l_P.detach()
    expected = {
        "loss": loss.item(),
        "rewards/chosen": w_P.mean().item(),
        "rewards/rejected": l_P.mean().item(),
        "rewards/margins": (w_P - l_P).mean().item(),
        "rewards/accuracies": (w_P > l_P).double().mean().item(),
        "rewards/mean": rewards_P2.mean().item(),
        "rewards/std": rewards_P2.std(correction=0).item(),
    }
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_step_is_the_same_however_it_is_split(model: ScalarModel, mesh: Mesh) -> None:
    metrics = check_splits(partial(step_of, model, mesh, ragged_pairs(12, margin=0.3)), rel=1e-4)
    assert 0 < metrics["rewards/accuracies"] < 1


def test_validation_has_no_dropout_and_leaves_training_on(tiny_model: Callable[..., Path], mesh: Mesh) -> None:
    pairs = ragged_pairs(4, margin=0.3)
    dropping = build_scalar_model(TrainedModelConfig(name=str(tiny_model(attention_dropout=0.5))), mesh, seed=0)
    objective = reward_objective(RewardTrainingConfig.model_validate({"data": {"seq_len": 16}}), mesh)
    assert objective.measure(dropping, pairs) == objective.measure(dropping, pairs)
    assert dropping.training
    assert objective.accumulate_gradients(dropping, pairs) != objective.accumulate_gradients(dropping, pairs)
