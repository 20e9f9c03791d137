"""KTO: its loss against the formula, its data, and a whole step against transformers' logits, however it is split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.config import DpoConfig
from holdfast.config.preference import PreferenceDataConfig, PreferenceLossConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.preference.kto import KtoObjective
from holdfast.trainer.preference.losses import kto_loss
from holdfast.trainer.preference.pairs import (
    LabelledAnswer,
    fingerprint_preferences,
    load_answers,
    load_pairs,
    mismatched_places,
    split_preferences,
)
from holdfast.trainer.preference.reference import Reference, reference_logprobs
from tests.builders.preference_steps import check_splits, taken_gradients
from tests.models.plain_logprobs import answer_logprob

ROWS = [
    {"prompt": "ab>", "completion": "ba", "label": True},
    {"prompt": "ab>", "completion": "ab done", "label": False},
    {"prompt": "cde>", "completion": "edc", "label": True},
]


def loss_config(**settings: Any) -> PreferenceLossConfig:
    return PreferenceLossConfig.model_validate({"type": "kto", "beta": 0.3, **settings})


@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 1e4, -1e4, 1e-300, 1e300, -1e300])
@pytest.mark.parametrize("kl", [0.0, 1e4])
def test_extremes_stay_finite_and_bounded(label: bool, ratio: float, kl: float) -> None:
    ratios_A = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    losses_A, _ = kto_loss(ratios_A, torch.tensor([label]), kl, loss_config())
    (gradient,) = torch.autograd.grad(losses_A.sum(), ratios_A)
    assert 0 <= losses_A.item() <= 1 and abs(gradient.item()) <= 0.3 / 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"reference": "none"}, "reference = none is for other types than kto"),
        ({"rpo_alpha": 1.0}, "kto, which has no pairs"),
        ({"odpo_alpha": 1.0}, "is for type = dpo"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"desirable_weight": 0.0}, "desirable_weight"),
        ({"type": "dpo", "undesirable_weight": 2.0}, "undesirable_weight = 2.0 are for type = kto"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        loss_config(**settings)
    assert (loss_config(beta=None).scale, loss_config().reference) == (0.1, "precomputed")


def test_every_answer_is_taken_once_with_another_prompt_unless_one_prompt_has_more_than_half() -> None:
    random = np.random.default_rng(0)
    for case in range(300):
        count = int(random.integers(2, 30))
        prompts = [bytes([letter]) for letter in random.integers(0, random.integers(2, 9), count)]
        if len(set(prompts)) < 2:
            continue
        others = mismatched_places(prompts)
        assert all(prompts[other] != prompts[place] for place, other in enumerate(others)), case
        most = max(map(prompts.count, set(prompts)))
        taken = [others.count(place) for place in range(count)]
        assert set(taken) == {1} if 2 * most <= count else max(taken) <= -(-most // (count - most)), case
    assert mismatched_places([b"a"] * 3) == mismatched_places([b"a"]) == []


def settings_of(path: Path, rows: list[dict[str, Any]], **more: Any) -> PreferenceDataConfig:
    file = path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceDataConfig.model_validate({"name": str(file), "seq_len": 32, **more})


def text_of(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    return str(tokenizer.decode(sample.token_ids, skip_special_tokens=True))


def test_labelled_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    answers = load_answers(settings_of(tmp_path, ROWS), tokenizer)
    assert [(answer.is_desirable, answer.number, answer.row) for answer in answers] == [
        (True, 0, 0),
        (False, 1, 1),
        (True, 2, 2),
    ]
    assert [text_of(tokenizer, answer.answer) for answer in answers] == ["ab>ba", "ab>ab done", "cde>edc"]
    assert [text_of(tokenizer, answer.mismatched) for answer in answers] == ["ab>edc", "ab>edc", "cde>ba"]
    for answer in answers:
        trained = answer.mismatched.token_ids[answer.mismatched.loss_mask]
        other = answers[0 if answer.number == 2 else 2].answer
        assert trained.tolist() == other.token_ids[other.loss_mask].tolist()
    turned = load_answers(settings_of(tmp_path, [{**row, "label": not row["label"]} for row in ROWS]), tokenizer)
    assert fingerprint_preferences(answers) != fingerprint_preferences(turned), "labels are part of it"


def test_pairs_are_a_good_and_a_bad_answer_each(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "ab>", "chosen": "ba", "rejected": "ab"}, {"prompt": "cde>", "chosen": "edc", "rejected": "c"}]
    config = settings_of(tmp_path, rows)
    answers, pairs = load_answers(config, tokenizer), load_pairs(config, tokenizer)
    assert [(answer.is_desirable, answer.row) for answer in answers] == [(True, 0), (False, 0), (True, 1), (False, 1)]
    sides = [side for pair in pairs for side in pair.sides]
    assert [text_of(tokenizer, answer.answer) for answer in answers] == [text_of(tokenizer, side) for side in sides]
    mismatched = [text_of(tokenizer, answer.mismatched) for answer in answers]
    assert mismatched == ["ab>edc", "ab>c", "cde>ba", "cde>ab"], "good and bad ones, never that of the same prompt"


def test_what_cannot_be_used_is_refused_or_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    def load(rows: list[dict[str, Any]], **more: Any) -> list[LabelledAnswer]:
        return load_answers(settings_of(tmp_path, rows, **more), tokenizer)

    for label in (1, "true", None):
        with pytest.raises(DataError, match="row 3: `label` must be true .* or false"):
            load([*ROWS[:2], {**ROWS[2], "label": label}])
    with pytest.raises(DataError, match="all answers have the same prompt, and KTO needs at least two"):
        load(ROWS[:2])
    with pytest.raises(DataError, match=r"rows need `prompt`, `completion` and `label` .*, or those of pairs"):
        load([{"prompt": "a", "completion": "b"}])
    with pytest.raises(DataError, match=r"row 2: the answer has \d+ tokens, data.seq_len is 9"):
        load(ROWS, seq_len=9)
    assert (
        len(load(ROWS, seq_len=9, too_long="drop")) == 2 and "1 answers of more than 9 tokens were drop" in caplog.text
    )
    cut = load(ROWS, seq_len=9, too_long="truncate")
    assert [len(answer.answer.token_ids) for answer in cut][1] == 9 and "were cut" in caplog.text
    long = {**ROWS[0], "prompt": "abcdefgh>"}  # cut, nothing of the answer is left
    assert len(load([long, *ROWS], seq_len=9, too_long="truncate")) == 3
    assert "1 answers have nothing to train on and are left out" in caplog.text
    with pytest.raises(DataError, match="no answers to train on are left"):
        load([long], seq_len=9, too_long="truncate")
    longer = {**ROWS[2], "completion": "edcedc"}
    mismatched = [answer.mismatched for answer in load([*ROWS[:1], longer], seq_len=11)]
    assert max(len(sample.token_ids) for sample in mismatched) <= 11


def ragged_answers(count: int) -> list[LabelledAnswer]:
    """Return answers of random tokens and lengths; two of three are good."""
    random = np.random.default_rng(0)
    samples = []
    for number in range(count):
        prompt, answer = random.integers(5, 40, random.integers(1, 6)), random.integers(5, 40, random.integers(1, 9))
        mask = np.repeat([False, True], [len(prompt), len(answer)])
        samples.append(Sample(np.concatenate([prompt, answer]).astype(np.int32), mask, value=float(number % 3 > 0)))
    turned = [*samples[1:], samples[0]]
    return [
        LabelledAnswer(one, replace(other, value=0.0), number, number // 2)
        for number, (one, other) in enumerate(zip(samples, turned, strict=True))
    ]


def test_both_answers_of_a_row_are_held_out_together() -> None:
    answers = ragged_answers(20)
    training, held_out = split_preferences(answers, 0.3, seed=1)
    assert (len(training), len(held_out)) == (14, 6)
    assert not {answer.row for answer in training} & {answer.row for answer in held_out}
    assert sorted(answer.number for answer in (*training, *held_out)) == list(range(20))


@pytest.fixture(scope="module")
def policy(tiny_model: Callable[..., Path], mesh: Mesh) -> Policy:
    return build_policy(TrainedModelConfig(name=str(tiny_model()), init="pretrained"), mesh, seed=0)


def objective_of(
    policy: Policy, mesh: Mesh, answers: list[LabelledAnswer], *, offset: float, **data: Any
) -> KtoObjective:
    """Return the objective against a reference that is a little off the policy, by `offset` nats in the mean."""
    settings = {"type": "kto", "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
    config = DpoConfig.model_validate({"data": {"seq_len": 16, **data}, "loss": settings})
    noise = np.random.default_rng(1).normal(size=(len(answers), 2)) - offset
    return KtoObjective(config, Reference(reference_logprobs(policy, answers, config.data, mesh) + noise, {}), mesh)


@pytest.mark.parametrize("offset", [2.5, -2.5], ids=["above the reference", "below it, where z is 0"])
def test_a_step_is_what_transformers_logits_and_the_formula_give(offset: float, policy: Policy, mesh: Mesh) -> None:
    answers = ragged_answers(5)
    objective = objective_of(policy, mesh, answers, offset=offset)
    metrics = objective.accumulate_gradients(policy, answers)
    found = taken_gradients(policy)
    reference = objective.reference.logprobs_P2
    with torch.no_grad():
        ratios = [answer_logprob(policy, a.mismatched).item() - reference[a.number, 1] for a in answers]
    kl = max(0.0, sum(ratios) / 5)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-5) and (kl > 1) == (offset > 0)
    loss = torch.zeros((), dtype=torch.float64)
    for answer in answers:
        ratio = answer_logprob(policy, answer.answer) - reference[answer.number, 0]
        gain = 0.3 * (ratio - kl) * (1 if answer.is_desirable else -1)
        loss = loss + (1.2 if answer.is_desirable else 0.8) * (1 - torch.sigmoid(gain)) / 5
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(found, taken_gradients(policy), rtol=1e-4, atol=1e-6)


def test_a_step_is_the_same_however_it_is_split(policy: Policy, mesh: Mesh) -> None:
    answers = ragged_answers(12)

    def step(**data: Any) -> tuple[dict[str, float], Tensor]:
        objective = objective_of(policy, mesh, answers, offset=1.0, **data)
        return objective.accumulate_gradients(policy, answers), taken_gradients(policy)

    metrics = check_splits(step)
    assert metrics["kl"] > 0.1 and metrics["desirable"] == pytest.approx(2 / 3) and policy.training
    whole = objective_of(policy, mesh, answers, offset=1.0, micro_batch_size=12)
    assert whole.measure(policy, answers) == pytest.approx(metrics, rel=1e-6)


def test_the_rewards_of_each_label_are_means_over_that_label(policy: Policy, mesh: Mesh) -> None:
    answers = ragged_answers(9)
    objective = objective_of(policy, mesh, answers, offset=1.0)
    metrics = objective.measure(policy, answers)
    with torch.no_grad():
        logps = [answer_logprob(policy, answer.answer).item() for answer in answers]
    rewards = [0.3 * (logp - objective.reference.logprobs_P2[k, 0]) for k, logp in enumerate(logps)]
    good = [answer.number for answer in answers if answer.is_desirable]
    bad = [answer.number for answer in answers if not answer.is_desirable]
    for side, numbers in (("chosen", good), ("rejected", bad)):
        assert metrics[f"rewards/{side}"] == pytest.approx(np.mean([rewards[k] for k in numbers]), rel=1e-5)
        assert metrics[f"logps/{side}"] == pytest.approx(np.mean([logps[k] for k in numbers]), rel=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    alone = objective.measure(policy, [answers[k] for k in good])
    assert "rewards/rejected" not in alone and "rewards/margins" not in alone and alone["desirable"] == 1
    assert "rewards/chosen" not in objective.measure(policy, [answers[k] for k in bad])
