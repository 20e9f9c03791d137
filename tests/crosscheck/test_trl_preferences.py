"""Preference losses against TRL's trainers, from the token ids on, with the gradients of a real model. Shapes: P pairs,
S = 2 P answers (first all that are chosen), L positions, N tokens of all answers."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from holdfast.config.preference import RewardLossConfig
from holdfast.trainer.preference.losses import PairLogprobs, kto_loss, preference_loss, reward_loss, sequence_sums
from tests.builders.slow_preferences import preference_config
from tests.conftest import ModelFactory

pytestmark = pytest.mark.trl

PAIR_LENGTHS = [(4, 7), (6, 6), (8, 1), (2, 5)]


@dataclass(frozen=True)
class Answers:
    """Prompts of `prompt_tokens` tokens, each followed by an answer, padded on the right."""

    input_ids_SL: Tensor
    attention_SL: Tensor
    answer_SL: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.answer_SL.sum(1).tolist()

    def sums(self, model: PreTrainedModel) -> Tensor:
        """Return the log-probability of every answer, (S,), by a log-softmax over the model's logits."""
        logits = model(input_ids=self.input_ids_SL, attention_mask=self.attention_SL).logits[:, :-1]
        taken_SL = logits.log_softmax(-1).gather(2, self.input_ids_SL[:, 1:, None])[..., 0]
        return sequence_sums(taken_SL[self.answer_SL[:, 1:].bool()], self.lengths)

    def pairs(self, model: PreTrainedModel, reference_S: Tensor | None = None) -> PairLogprobs:
        """Return the input of our losses; without a reference it is zeros."""
        sums_S = self.sums(model)
        reference_S = torch.zeros_like(sums_S) if reference_S is None else reference_S
        tokens_S = torch.tensor(self.lengths, dtype=torch.float64)
        margins_P = torch.zeros(len(tokens_S) // 2)
        return PairLogprobs(*sums_S.chunk(2), *reference_S.chunk(2), *tokens_S.chunk(2), margins_P)

    def for_dpo(self, reference_S: Tensor) -> dict[str, Tensor]:
        chosen_P, rejected_P = reference_S.chunk(2)
        return {
            "input_ids": self.input_ids_SL, "attention_mask": self.attention_SL, "completion_mask": self.answer_SL,
            "ref_chosen_logps": chosen_P, "ref_rejected_logps": rejected_P,
        }  # fmt: skip

    def for_cpo(self) -> dict[str, Tensor]:
        labels_SL = self.input_ids_SL.masked_fill(self.answer_SL == 0, -100)
        columns = {"input_ids": self.input_ids_SL, "attention_mask": self.attention_SL, "labels": labels_SL}
        halves = {name: column_SL.chunk(2) for name, column_SL in columns.items()}
        return {
            f"{side}_{name}": half[index]
            for index, side in enumerate(("chosen", "rejected"))
            for name, half in halves.items()
        }


def answers(pair_lengths: list[tuple[int, int]], *, prompt_tokens: int = 3) -> Answers:
    lengths_S = torch.tensor(pair_lengths).T.flatten()
    positions_L = torch.arange(prompt_tokens + int(lengths_S.max()))
    generator = torch.Generator().manual_seed(0)
    ids_SL = torch.randint(5, 100, (len(lengths_S), len(positions_L)), generator=generator)
    attention_SL = positions_L < prompt_tokens + lengths_S[:, None]
    answer_SL = attention_SL & (positions_L >= prompt_tokens)
    return Answers(ids_SL * attention_SL, attention_SL.long(), answer_SL.long())


def assert_same_loss_and_gradient(theirs: Tensor, mine: Tensor, model: PreTrainedModel, *, rtol: float = 1e-9) -> None:
    assert mine.item() == pytest.approx(theirs.item(), rel=rtol)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (mine, theirs))
    for of_mine, of_theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(of_mine, of_theirs, rtol=rtol, atol=rtol * 1e-2)


@pytest.fixture
def reference_S(tiny_model: ModelFactory, trl_trainers: ModuleType) -> Tensor:
    """Log-probabilities of the answers under another model."""
    with torch.no_grad():
        return answers(PAIR_LENGTHS).sums(trl_trainers.causal_model(tiny_model(seed=1)))


@pytest.mark.parametrize("kind", ["dpo", "ipo", "hinge", "robust", "apo_zero", "apo_down"])
def test_dpo_is_trls(kind: str, trl_trainers: ModuleType, model: Path, reference_S: Tensor, tmp_path: Path) -> None:
    """IPO takes the mean log-ratio of an answer's tokens in both; what TRL logs as its reward is of their sum."""
    smoothing = {"label_smoothing": 0.2} if kind == "robust" else {}
    trainer = trl_trainers.preference_trainer(
        "dpo", model, tmp_path, loss_type="sigmoid" if kind == "dpo" else kind, beta=0.3,
        precompute_ref_log_probs=True, **smoothing,
    )  # fmt: skip
    batch = answers(PAIR_LENGTHS)
    theirs = trainer._compute_loss(trainer.model, batch.for_dpo(reference_S), False)
    config = preference_config(kind, beta=0.3, **smoothing)
    scored = preference_loss(batch.pairs(trainer.model, reference_S), config)
    assert_same_loss_and_gradient(theirs, scored.losses_P.mean(), trainer.model)
    for name, rewards_P in (("chosen", scored.chosen_rewards_P), ("rejected", scored.rejected_rewards_P)):
        logged = trainer._metrics["train"][f"rewards/{name}"][0]
        assert kind == "ipo" or rewards_P.mean().item() == pytest.approx(logged, rel=1e-6)


def test_simpo_is_that_of_trl(trl_trainers: ModuleType, model: Path, tmp_path: Path) -> None:
    """SimPO of TRL is CPO with `simpo` and without CPO's own likelihood term."""
    settings = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 1.4}
    trainer = trl_trainers.preference_trainer("cpo", model, tmp_path, **settings)
    batch = answers(PAIR_LENGTHS)
    theirs, _ = trainer.get_batch_loss_metrics(trainer.model, batch.for_cpo())
    scored = preference_loss(batch.pairs(trainer.model), preference_config("simpo", beta=2.5, margin=1.4))
    assert_same_loss_and_gradient(theirs, scored.losses_P.mean(), trainer.model)


@pytest.mark.parametrize("lengths", PAIR_LENGTHS, ids=str)
def test_orpo_is_that_of_trl(lengths: tuple[int, int], trl_trainers: ModuleType, model: Path, tmp_path: Path) -> None:
    """TRL weighs tokens, of prompts too: the same for one pair and prompts of one token. Its odds are in float32."""
    trainer = trl_trainers.preference_trainer("orpo", model, tmp_path, beta=0.3)
    batch = answers([lengths], prompt_tokens=1)
    theirs, metrics = trainer.get_batch_loss_metrics(trainer.model, batch.for_cpo())
    scored = preference_loss(batch.pairs(trainer.model), preference_config("orpo", beta=0.3))
    assert_same_loss_and_gradient(theirs, scored.losses_P.mean(), trainer.model, rtol=1e-5)
    assert scored.chosen_rewards_P.mean().item() == pytest.approx(metrics["rewards/chosen"], rel=1e-6)


@pytest.mark.parametrize("drift", [2.0, -2.0], ids=["z above 0", "z below 0"])
def test_kto_is_trls(drift: float, trl_trainers: ModuleType, model: Path, reference_S: Tensor, tmp_path: Path) -> None:
    """Loss and gradient of the whole trainer: z is the mean log-ratio of the mismatched answers, no less than 0."""
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    trainer = trl_trainers.kto_trainer(model, tmp_path, beta=0.3, **weights)
    batch, mismatched = answers(PAIR_LENGTHS), answers([(b, a) for a, b in reversed(PAIR_LENGTHS)])
    labels_S = torch.tensor([True, False, True, True, False, True, False, False])
    with torch.no_grad():
        reference_mismatched_S = mismatched.sums(trainer.model) - drift - reference_S / 50
    inputs = {
        "input_ids": batch.input_ids_SL, "attention_mask": batch.attention_SL, "completion_mask": batch.answer_SL,
        "KL_input_ids": mismatched.input_ids_SL, "KL_attention_mask": mismatched.attention_SL,
        "KL_completion_mask": mismatched.answer_SL, "label": labels_S, "ref_logps": reference_S,
        "ref_KL_logps": reference_mismatched_S,
    }  # fmt: skip
    theirs = trainer._compute_loss(trainer.model, inputs, False)
    with torch.no_grad():
        kl = max(0.0, (mismatched.sums(trainer.model) - reference_mismatched_S).mean().item())
    ratios_A = batch.sums(trainer.model) - reference_S
    losses_A, rewards_A = kto_loss(ratios_A, labels_S, kl, preference_config("kto", beta=0.3, **weights))
    assert (kl > 0) == (drift > 0) and trainer._metrics["train"]["kl"][0] == pytest.approx(kl, rel=1e-6)
    assert_same_loss_and_gradient(theirs, losses_A.mean(), trainer.model)
    logged = trainer._metrics["train"]["rewards/chosen"][0]
    assert rewards_A[labels_S].mean().item() == pytest.approx(logged, rel=1e-6)


@pytest.mark.parametrize("margins", [None, [0.0, 1 / 3, 1.0, -0.5]], ids=["without margins", "with margins"])
def test_the_loss_of_reward_models_is_that_of_trl(
    margins: list[float] | None, trl_trainers: ModuleType, model: Path, tmp_path: Path
) -> None:
    trainer = trl_trainers.reward_trainer(model, tmp_path, center_rewards_coefficient=0.05)
    batch = answers(PAIR_LENGTHS)
    margins_P = torch.tensor(margins or [0.0] * 4, dtype=torch.float64)
    inputs = {"input_ids": batch.input_ids_SL, "attention_mask": batch.attention_SL}
    theirs = trainer.compute_loss(trainer.model, inputs | ({"margin": margins_P} if margins else {}))
    rewards_S = trainer.model(**inputs).logits[:, 0]
    losses_P = reward_loss(*rewards_S.chunk(2), margins_P, RewardLossConfig(center_coef=0.05))
    assert_same_loss_and_gradient(theirs, losses_P.mean(), trainer.model)
