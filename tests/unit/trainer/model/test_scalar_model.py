"""The scalar model against transformers: values and gradients, packed or not, its head, what is published, in `rl`."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.process.heartbeat import start_heartbeat
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.value_model import ScalarModel, build_scalar_model, predict_values, score_samples
from holdfast.trainer.preference.pairs import Pair
from holdfast.trainer.programs.reward_model import _with_padding
from holdfast.trainer.rl.auxiliary_models import RewardModel
from tests.builders.plain_models import copy_with_other_tokens, write_reward_model
from tests.builders.train_states import local_part
from tests.conftest import ModelFactory as Models
from tests.ranks.policy_metrics import ragged_samples

CPU = torch.device("cpu")


def samples() -> list[Sample]:
    generator = np.random.default_rng(0)
    return [Sample(generator.integers(5, 100, n).astype(np.int32), np.arange(n) >= 2) for n in (7, 3, 12)]


def build(directory: Path, mesh: Mesh, *, seed: int = 0, **config: Any) -> ScalarModel:
    return build_scalar_model(TrainedModelConfig(name=str(directory), **config), mesh, seed=seed)


@pytest.fixture
def reward_model(tiny_model: Models, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    return tmp_path / "reward_model", write_reward_model(tmp_path / "reward_model", tiny_model("llama", tied=False))


def values_of(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Return the value at each token, sample by sample and unpadded: the slow way."""
    ids = torch.as_tensor(sample.token_ids, dtype=torch.long)
    return model.score(model.model(ids[None]).last_hidden_state)[0, :, 0]  # type: ignore[operator]


@pytest.mark.parametrize("pack", [True, False])
def test_values_are_those_of_transformers(reward_model: tuple[Path, PreTrainedModel], mesh: Mesh, pack: bool) -> None:
    directory, theirs = reward_model
    ours = build(directory, mesh)
    micro = build_micro_batch(samples(), [2, 0, 1], pack=pack, device=CPU)
    values_N = predict_values(ours, micro)
    # The value of a trained token is that of the state before it.
    expected_N = torch.cat([values_of(theirs, samples()[index])[1:-1] for index in (2, 0, 1)])
    assert values_N.dtype == torch.float32 and len(values_N) == micro.target_ids_N.shape[0]
    torch.testing.assert_close(values_N, expected_N, rtol=1e-5, atol=1e-6)
    values_N.square().sum().backward()
    expected_N.square().sum().backward()
    gradients = {name: local_part(p.grad) for name, p in ours.hf_model.named_parameters() if p.grad is not None}
    assert "score.weight" in gradients and gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_each_pass_is_a_sign_of_life(tiny_model: Models, mesh: Mesh) -> None:
    heartbeat, model = start_heartbeat(), build(tiny_model("llama", tied=False), mesh)
    for _ in range(3):
        score_samples(model, samples(), [0, 1, 2], pack=True, device=CPU)
    assert heartbeat.beat.moves == 3


def test_no_samples_give_no_scores_and_zero_gradients(reward_model: tuple[Path, PreTrainedModel], mesh: Mesh) -> None:
    model = build(reward_model[0], mesh)
    scores_S = score_samples(model, samples(), [], pack=True, device=CPU)
    assert scores_S.shape == (0,)
    scores_S.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.hf_model.get_decoder().parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_gives_its_decoder(tied: bool, tiny_model: Models, mesh: Mesh) -> None:
    directory = tiny_model("qwen3", tied=tied)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    got = trained_tensors(build(directory, mesh).hf_model)
    assert got.keys() == (expected.keys() - {"lm_head.weight"}) | {"score.weight"}
    assert all(torch.equal(got[name], expected[name]) for name in got.keys() - {"score.weight"})


def test_a_random_head_is_a_function_of_the_seed_with_the_published_spread(tiny_model: Models, mesh: Mesh) -> None:
    directory = tiny_model(hidden_size=512, weights=False)

    def head(seed: int) -> Tensor:
        return build(directory, mesh, seed=seed, init="random").hf_model.get_parameter("score.weight").detach()

    before = torch.get_rng_state()
    first, again, other = head(0), head(0), head(1)
    assert torch.equal(torch.get_rng_state(), before), "building must not move the run's generator"
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (1, 512) and first.std().item() == pytest.approx(1 / math.sqrt(513), rel=0.1)
    assert abs(first.mean().item()) < 3 / 512


def test_a_critic_starts_at_zero_and_a_reward_model_keeps_its_head(
    tiny_model: Models, reward_model: tuple[Path, PreTrainedModel], mesh: Mesh
) -> None:
    fresh = build_scalar_model(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0, head="zero")
    assert not fresh.hf_model.get_parameter("score.weight").any()
    assert not score_samples(fresh, samples(), [0, 1, 2], pack=True, device=CPU).any()
    directory, theirs = reward_model
    kept = build_scalar_model(TrainedModelConfig(name=str(directory)), mesh, seed=0, head="zero")
    expected = theirs.state_dict()
    got = trained_tensors(kept.hf_model)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


def test_in_bfloat16_values_are_float32_and_so_are_the_masters(tiny_model: Models, mesh: Mesh) -> None:
    model, exact = build(tiny_model(), mesh, dtype="bfloat16"), build(tiny_model(), mesh)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    scores_S, exact_S = (score_samples(one, samples(), [0, 1, 2], pack=True, device=CPU) for one in (model, exact))
    assert scores_S.dtype == torch.float32
    torch.testing.assert_close(scores_S, exact_S, rtol=0.05, atol=0.05)
    scores_S.sum().backward()
    assert local_part(model.hf_model.get_parameter("score.weight").grad).norm() > 0.1  # type: ignore[arg-type]


def test_transformers_gives_equal_scores(tiny_model: Models, mesh: Mesh, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = build(tiny_model(), mesh).eval()
    published = WeightPublisher(RunDir(tmp_path), model, tokenizer, mesh, dtype="float32").publish(1)
    theirs = AutoModelForSequenceClassification.from_pretrained(published, dtype=torch.float32)
    assert theirs.config.num_labels == 1 and theirs.config.pad_token_id == 0
    assert theirs.config.architectures == ["Qwen3ForSequenceClassification"]
    assert theirs.config.problem_type == "regression"
    ours_S = score_samples(model, samples(), [0, 1, 2], pack=True, device=CPU)
    for sample, score in zip(samples(), ours_S, strict=True):
        logits = theirs(torch.as_tensor(sample.token_ids, dtype=torch.long)[None]).logits
        torch.testing.assert_close(score, logits[0, 0], rtol=1e-5, atol=1e-6)
    again = build(published, mesh)
    assert torch.equal(score_samples(again.eval(), samples(), [0, 1, 2], pack=True, device=CPU), ours_S)


def test_several_labels_and_a_missing_head_are_refused(tiny_model: Models, mesh: Mesh, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "three", tiny_model(), num_labels=3)
    with pytest.raises(DataError, match="scores 3 labels .num_labels in its config.json.; a reward model scores 1"):
        build(tmp_path / "three", mesh)
    theirs = write_reward_model(tmp_path / "one", tiny_model())
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if name != "score.weight"}
    theirs.save_pretrained(tmp_path / "one", state_dict=tensors)
    with pytest.raises(DataError, match="lack 1 tensors, such as score.weight"):
        build(tmp_path / "one", mesh)


BERT = {
    "is_decoder": True, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "said"), [
    ("codegen", {"n_embd": 32, "n_layer": 1, "n_head": 4}, "no sequence classification for codegen"),
    ("bert", BERT, "BertForSequenceClassification has no linear head named score.weight"),
])  # fmt: skip
def test_models_that_cannot_score(kind: str, config: dict[str, Any], said: str, mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    with pytest.raises(DataError, match=said):
        build(tmp_path, mesh, init="random")


def test_a_policy_is_not_made_from_a_reward_model(reward_model: tuple[Path, PreTrainedModel], mesh: Mesh) -> None:
    with pytest.raises(DataError, match="scores whole sequences"):
        build_policy(TrainedModelConfig(name=str(reward_model[0])), mesh, seed=0)


@pytest.fixture
def directory(tiny_model: Models, tmp_path: Path) -> Path:
    """A reward model with dropout, as transformers writes it."""
    write_reward_model(tmp_path / "judge", tiny_model("llama", tied=False, attention_dropout=0.5))
    return tmp_path / "judge"


def policy_config(tiny_model: Models) -> TrainedModelConfig:
    """Of a policy of another architecture, without weights of its own: nothing of it but the tokenizer is read."""
    return TrainedModelConfig(name=str(tiny_model("qwen3", weights=False)), init="random")


def test_scores_are_transformers_and_move_no_generator(directory: Path, tiny_model: Models, mesh: Mesh) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    model = RewardModel(str(directory), policy_config(tiny_model), mesh)
    expected = [theirs(torch.from_numpy(s.token_ids)[None].long()).logits.item() for s in ragged_samples()]
    for row_tokens in (4, 13, 1000):
        assert model.score(ragged_samples(), row_tokens=row_tokens) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert model.score(ragged_samples(), row_tokens=13) == model.score(ragged_samples(), row_tokens=13)
    before = torch.get_rng_state()
    model = RewardModel(str(directory), policy_config(tiny_model), mesh)
    model.score(ragged_samples(), row_tokens=13)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.model.training and not any(p.requires_grad for p in model.model.parameters())


def test_another_tokenizer_and_a_language_model_are_refused(directory: Path, tiny_model: Models, mesh: Mesh) -> None:
    other = copy_with_other_tokens(directory, directory.with_name("other"))
    with pytest.raises(DataError, match="has another tokenizer .*: 2 tokens differ, such as 'a'"):
        RewardModel(str(other), policy_config(tiny_model), mesh)
    with pytest.raises(DataError, match="a language model without a score. Train one with `reward-model`"):
        RewardModel(str(tiny_model()), policy_config(tiny_model), mesh)


@pytest.mark.parametrize(("pads", "published", "told"), [
    ((7, 1), 7, ""), ((None, 1), 1, ""), ((None, None), None, "neither model nor tokenizer has a pad token"),
    ((None, 9), 9, "answers end in token 9, which is also the padding"),
])  # fmt: skip
def test_the_padding_of_a_reward_model_is_told_where_it_would_mislead_transformers(
    pads: Any, published: int | None, told: str, tiny_model: Models, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    of_model, of_tokenizer = pads
    sides = [Sample(np.array([5, 6, end], dtype=np.int32), np.ones(3, dtype=bool)) for end in (8, 9)]
    tokenizer = SimpleNamespace(pad_token_id=of_tokenizer)
    build = _with_padding(tokenizer, [Pair(*sides, number=0)])  # type: ignore[arg-type]
    config = TrainedModelConfig(name=str(tiny_model("llama", tied=False, pad_token_id=of_model)))
    assert build(config, mesh, seed=0, weights=True).hf_model.config.pad_token_id == published
    assert told in caplog.text and (told or "padding" not in caplog.text)
