"""Losses of preferences and reward models by hand, at extremes, refused; by formula: test_every_name_computes."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.chat.tokenizer import end_token_ids
from holdfast.config import DpoConfig, RewardTrainingConfig
from holdfast.config.load import parse_command_line
from holdfast.config.preference import PREFERENCE_LOSSES, PreferenceLossConfig, RewardLossConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import ConfigError
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.samples import chat_tokenizer
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.value_model import ScalarModel, build_scalar_model
from holdfast.trainer.preference.losses import PairLosses, preference_loss, reward_loss
from holdfast.trainer.preference.pairs import Pair
from holdfast.trainer.programs.reward_model import end_at_stop_token, reward_objective
from tests.builders.preference_steps import check_splits, ragged_pairs, taken_gradients
from tests.builders.slow_preferences import pairs, preference_config, variants
from tests.conftest import ModelFactory

MARGIN = torch.tensor([0.5], dtype=torch.float64)
ALL = [one for name in PREFERENCE_LOSSES if name != "kto" for one in variants(name)]


def one(kind: str, policy: tuple[float, float], reference: tuple[float, float] = (0, 0), **settings: Any) -> PairLosses:
    """Return the loss of a pair whose chosen answer has 2 tokens, and whose rejected one has 4; its margin is 0.5."""
    rows = [torch.tensor([row], dtype=torch.float64) for row in (policy, reference, (2, 4))]
    return preference_loss(pairs(*rows, MARGIN), preference_config(kind, **settings))


def test_the_log_odds_of_orpo_keep_their_digits_at_both_ends() -> None:
    """p = 1 - 1e-6 has the odds 999999; p = exp(-50) has odds of as good as itself."""
    scored = one("orpo", (2 * math.log1p(-1e-6), 4 * -50.0), beta=1.0)
    log_odds = math.log(999999) + 50
    assert scored.losses_P.item() == pytest.approx(1e-6 + math.log1p(math.exp(-log_odds)), rel=1e-6)
    turned = one("orpo", (2 * -50.0, 4 * math.log1p(-1e-6)), beta=1.0)
    assert turned.losses_P.item() == pytest.approx(50 + log_odds, rel=1e-9)


def test_rewards_are_beta_times_what_the_loss_compares() -> None:
    kinds = dict.fromkeys(("dpo", "ipo_sum", "hinge", "robust", "apo_zero", "apo_down"), (0.25, -0.5))
    for kind, expected in (kinds | {"ipo": (0.125, -0.125), "simpo": (-0.125, -0.1875)}).items():
        scored = one(kind, (-1, -3), (-2, -1), beta=0.25)
        assert (scored.chosen_rewards_P.item(), scored.rejected_rewards_P.item()) == expected, kind
    scored = one("orpo", (-1, -3), beta=0.25)
    assert (scored.chosen_rewards_P.item(), scored.rejected_rewards_P.item()) == (-0.125, -0.1875)


EXTREMES = st.sampled_from([0.0, -4e4, -1e4, -1e-30]) | st.floats(-4e4, 0)


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.type)
@settings(max_examples=40)
@given(
    policy=st.tuples(EXTREMES, EXTREMES),
    reference=st.tuples(EXTREMES, EXTREMES),
    lengths=st.sampled_from([1.0, 4096.0]),
)
def test_extremes_stay_finite(
    loss: PreferenceLossConfig, policy: tuple[float, float], reference: tuple[float, float], lengths: float
) -> None:
    """Loss and gradient of answers of one token, equal log-probabilities, and log-ratios of up to 4e4."""
    rows = [torch.tensor([values], dtype=torch.float64) for values in (policy, reference, (1.0, lengths))]
    rows[0].requires_grad_()
    scored = preference_loss(pairs(*rows, MARGIN), loss)
    assert not scored.chosen_rewards_P.requires_grad and not scored.rejected_rewards_P.requires_grad
    total = scored.losses_P.sum()
    (gradient,) = torch.autograd.grad(total, rows[0])
    assert math.isfinite(total.item()) and torch.isfinite(gradient).all()
    if loss.type in ("dpo", "hinge", "robust", "apo_zero", "apo_down"):
        bound = loss.beta * (2 if loss.type == "robust" else 1) + loss.rpo_alpha
        assert gradient.abs().max() <= bound, "whatever the log-ratios, a pair pulls by beta at most"


@pytest.mark.parametrize(("settings", "named"), [
    (
        {"type": "apo_zero", "label_smoothing": 0.1},
        "no effect with loss.type = 'apo_zero' .flag --loss.: it belongs to 'dpo', 'robust'.",
    ),
    ({"type": "dpo", "margin": 1.0}, "margin"),
    (
        {"type": "ipo", "odpo_alpha": 1.0},
        "no effect with loss.type = 'ipo' .flag --loss.: it belongs to 'dpo'. .* set loss.type to 'dpo'",
    ),
    (
        {"type": "dpo", "odpo_alpha": 1.0, "label_smoothing": 0.1},
        "odpo_alpha = 1.0 does not go with label_smoothing = 0.1",
    ),
    ({"type": "orpo", "rpo_alpha": 1.0}, "no effect with loss.type = 'orpo' .flag --loss.: it belongs to 'dpo', 'ipo'"),
    ({"type": "dpo", "rpo_alpha": -1.0}, "rpo_alpha"),
    ({"type": "simpo", "reference": "precomputed"}, "no effect with loss.type = 'simpo' .*loss.: it belongs to 'dpo'"),
    ({"type": "simpo", "reference_model": "b"}, "'loss.reference_model' has no effect with loss.type = 'simpo'"),
    (
        {"type": "dpo", "reference": "none", "reference_model": "b"},
        "reference_model = 'b' has no use with reference = none",
    ),
    ({"type": "dpo", "beta": 0.0}, "beta"),
    ({"type": "kto", "reference": "none"}, "'loss.reference' should be 'precomputed', got \"none\""),
    ({"type": "kto", "rpo_alpha": 1.0}, "'loss.rpo_alpha' has no effect with loss.type = 'kto'"),
    ({"type": "kto", "odpo_alpha": 1.0}, "no effect with loss.type = 'kto'"),
    ({"type": "kto", "label_smoothing": 0.1}, "label_smoothing"),
    ({"type": "kto", "desirable_weight": 0.0}, "desirable_weight"),
    ({"type": "dpo", "undesirable_weight": 2.0}, "it belongs to 'kto'"),
    ({"type": "simpoo"}, "no 'simpoo'. Did you mean 'simpo'.*Allowed: dpo, ipo"),
])  # fmt: skip
def test_settings_that_a_loss_does_not_know_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_command_line(DpoConfig, ["--loss", json.dumps(settings)])


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_defaults_depend_on_the_loss_and_survive_being_written(kind: str) -> None:
    settings, without_reference = preference_config(kind), ("simpo", "orpo")
    assert settings.beta == (2.0 if kind == "simpo" else 0.1)
    assert DpoConfig(loss=settings).has_reference is (kind not in without_reference)
    assert PreferenceLossConfig.of(**settings.model_dump(exclude_none=True)) == settings


def test_very_wrong_pairs_have_a_finite_loss_and_gradient() -> None:
    rows = torch.tensor([[-1e4], [1e4], [0.0]], dtype=torch.float64, requires_grad=True)
    loss_P = reward_loss(*rows, RewardLossConfig())
    loss_P.sum().backward()
    assert loss_P.item() == pytest.approx(2e4) and rows.grad is not None and rows.grad[0].item() == -1


@pytest.mark.parametrize("settings", [{"loss": {"center_coef": -0.1}}, {"val_interval": 3}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"center_coef|val_interval"):
        RewardTrainingConfig.model_validate(settings)


@pytest.fixture(scope="module")
def model(tiny_model: ModelFactory, mesh: Mesh) -> ScalarModel:
    return build_scalar_model(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)


def test_sides_end_with_the_stop_token_as_sampled_ones_do(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Whatever white space a chat template puts behind it; text behind it stays, and so does a prompt's stop token."""
    stop = tokenizer.eos_token_id
    text, space, closing = (tokenizer(part)["input_ids"] for part in ("ab", " ", "z"))
    # Of a directory without tokenizer.json, which transformers may read.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, *closing]}))
    with_stops = chat_tokenizer(tokenizer, end_token_ids=end_token_ids(str(tmp_path)))

    def shortened(*answer: int) -> list[int]:
        ids = np.asarray([*text, stop, *answer], dtype=np.int32)
        side = Sample(ids, np.arange(len(ids)) > len(text))
        pair = end_at_stop_token(Pair(side, side, number=3), with_stops)
        assert pair.number == 3 and all(len(s.token_ids) == len(s.loss_mask) for s in pair.sides)
        return pair.rejected.token_ids.tolist()[len(text) + 1 :]

    assert shortened(*text, stop, *space) == [*text, stop]
    assert shortened(*text, stop, *space, stop, *space, *space) == [*text, stop, *space, stop]
    assert shortened(*text, *closing, *space) == [*text, *closing]
    assert shortened(*text, stop) == [*text, stop] and shortened(*text, stop, *text) == [*text, stop, *text]
    assert shortened(*text, *space) == [*text, *space]


def step_of(model: ScalarModel, mesh: Mesh, pairs: list[Pair], **data: Any) -> tuple[dict[str, float], Tensor]:
    config = RewardTrainingConfig.model_validate({"data": {"seq_len": 16, **data}, "loss": {"center_coef": 0.05}})
    return reward_objective(config, mesh).accumulate_gradients(model, pairs), taken_gradients(model)


def test_a_step_is_what_transformers_and_the_formula_give_however_it_is_split(model: ScalarModel, mesh: Mesh) -> None:
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
        "loss": loss.item(), "rewards/chosen": w_P.mean().item(), "rewards/rejected": l_P.mean().item(),
        "rewards/margins": (w_P - l_P).mean().item(), "rewards/accuracies": (w_P > l_P).double().mean().item(),
        "rewards/mean": rewards_P2.mean().item(), "rewards/std": rewards_P2.std(correction=0).item(),
    }  # fmt: skip
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    metrics = check_splits(partial(step_of, model, mesh, ragged_pairs(12, margin=0.3)), rel=1e-4)
    assert 0 < metrics["rewards/accuracies"] < 1


def test_validation_has_no_dropout_and_leaves_training_on(tiny_model: ModelFactory, mesh: Mesh) -> None:
    pairs = ragged_pairs(4, margin=0.3)
    dropping = build_scalar_model(TrainedModelConfig(name=str(tiny_model(attention_dropout=0.5))), mesh, seed=0)
    objective = reward_objective(RewardTrainingConfig.model_validate({"data": {"seq_len": 16}}), mesh)
    assert objective.measure(dropping, pairs) == objective.measure(dropping, pairs) and dropping.training
    assert objective.accumulate_gradients(dropping, pairs) != objective.accumulate_gradients(dropping, pairs)
