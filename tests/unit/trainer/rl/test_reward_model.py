"""The reward model of an RL run, and the moving average of the policy's weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForSequenceClassification

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.preference.pairs import Pair
from holdfast.trainer.programs.reward_model import _with_padding
from holdfast.trainer.rl.auxiliary_models import Ema, RewardModel
from tests.builders.plain_models import copy_with_other_tokens, write_reward_model
from tests.ranks.policy_metrics import ragged_samples

Models = Callable[..., Path]


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


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "published", "told"),
    [
        (7, 1, 7, ""),
        (None, 1, 1, ""),
        (None, None, None, "neither model nor tokenizer has a pad token"),
        (None, 9, 9, "answers end in token 9, which is also the padding"),
    ],
)
def test_the_padding_of_a_reward_model_is_told_where_it_would_mislead_transformers(
    of_model: int | None,
    of_tokenizer: int | None,
    published: int | None,
    told: str,
    tiny_model: Models,
    mesh: Mesh,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sides = [Sample(np.array([5, 6, end], dtype=np.int32), np.ones(3, dtype=bool)) for end in (8, 9)]
    tokenizer = SimpleNamespace(pad_token_id=of_tokenizer)
    build = _with_padding(tokenizer, [Pair(*sides, number=0)])  # type: ignore[arg-type]
    config = TrainedModelConfig(name=str(tiny_model("llama", tied=False, pad_token_id=of_model)))
    model = build(config, mesh, seed=0, weights=True)
    assert model.hf_model.config.pad_token_id == published
    assert told in caplog.text and (told or "padding" not in caplog.text)


def test_many_updates_equal_the_weighted_sum_over_all_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(7, generator=generator) for _ in range(40)]
    ema = Ema({"a": steps[0]}, decay=0.9)
    for weights in steps[1:]:
        ema.update({"a": weights})
    last = len(steps) - 1
    expected = 0.9**last * steps[0].double()
    for step in range(1, len(steps)):
        expected += 0.1 * 0.9 ** (last - step) * steps[step].double()
    torch.testing.assert_close(ema.tensors()["a"].double(), expected, atol=1e-6, rtol=1e-5)


def test_the_average_is_a_copy_in_float32_that_stays_in_place_so_that_loading_reaches_it() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    ema = Ema({"a": weights}, decay=0.5)
    held = ema.tensors()["a"]
    with torch.no_grad():
        weights.add_(2.0)
    ema.update({"a": weights})
    assert held.tolist() == [2.0] * 3 and weights.tolist() == [3.0] * 3 and not held.requires_grad
    held.copy_(torch.tensor([4.0, 8.0, 9.0]))
    assert ema.tensors()["a"].tolist() == [4.0, 8.0, 9.0]
    weights = torch.ones(1, dtype=torch.bfloat16)
    ema = Ema({"a": weights}, decay=0.992)
    nudged = weights * 1.0078125  # the next bfloat16: 0.008 of the way is too little for that type
    for _ in range(3):
        ema.update({"a": nudged})
    (average,) = ema.tensors().values()
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(1 + 0.0078125 * (1 - 0.992**3), abs=1e-7)


def test_shards_stay_sharded_and_average_as_whole_tensors_do(mesh: Mesh) -> None:
    start, after = torch.randn(2, 6, 4)
    ema = Ema({"a": distribute_tensor(start, mesh.device_mesh, [Shard(0)])}, decay=0.992)
    ema.update({"a": distribute_tensor(after, mesh.device_mesh, [Shard(0)])})
    average = ema.tensors()["a"]
    assert isinstance(average, DTensor) and average.placements == (Shard(0),)
    whole = Ema({"a": start}, decay=0.992)
    whole.update({"a": after})
    assert torch.equal(average.to_local(), whole.tensors()["a"])
