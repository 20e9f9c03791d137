"""Reward models with LoRA: the adapters and the head are trained, saved, published merged, and loaded by peft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from holdfast.config import RewardTrainingConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_DIR, read_base
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_parameters, trained_tensors
from holdfast.trainer.model.lora import HEAD, Adapters
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout
from holdfast.trainer.model.value_model import ScalarModel, build_scalar_model, score_samples
from holdfast.trainer.rl.auxiliary_models import RewardModel
from tests.builders.train_states import copied, local_part, same
from tests.ranks.policy_metrics import ragged_samples

Models = Callable[..., Path]


@pytest.fixture
def build(tiny_model: Models, mesh: Mesh) -> Callable[..., ScalarModel]:
    """Return a maker of adapted reward models: `build(directory, seed=0, weights=True, **lora)`."""

    def make(directory: Path | None = None, *, seed: int = 0, weights: bool = True, **lora: Any) -> ScalarModel:
        config = {"name": str(directory or tiny_model()), "lora": {"rank": 2, "alpha": 6.0, **lora}}
        return build_scalar_model(TrainedModelConfig.model_validate(config), mesh, seed=seed, weights=weights)

    return make


def scores(model: ScalarModel) -> torch.Tensor:
    samples = ragged_samples()
    return score_samples(model, samples, list(range(len(samples))), pack=True, device=torch.device("cpu"))


def fill(model: ScalarModel) -> ScalarModel:
    """Give adapters and head values under which they matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in trained_tensors(model.hf_model).values():
            local = local_part(tensor)
            local.copy_(torch.randn(local.shape, generator=generator) * 0.2)
    return model


def published(model: ScalarModel, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, path: Path) -> Path:
    adapters = Adapters(model.hf_model, TensorLayout(model.hf_model, None), base_name="base")
    publisher = WeightPublisher(RunDir(path), model, tokenizer, mesh, dtype="float32", adapters=adapters)
    return publisher.publish(1)


def test_adapters_and_head_are_trained_and_nothing_else(build: Any, tiny_model: Models, mesh: Mesh) -> None:
    model = build()
    names = set(trained_tensors(model.hf_model))
    assert HEAD in names and trained_parameters(model.hf_model).keys() == names
    assert {name for name in names if ".lora_" not in name} == {HEAD}
    assert {name for name, p in model.hf_model.named_parameters() if p.requires_grad and ".lora_" not in name} == {HEAD}
    plain = build_scalar_model(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)
    torch.testing.assert_close(scores(model), scores(plain), rtol=0, atol=0)  # B is 0 and the head the same
    for kind in (".lora_A.", ".lora_B."):
        assert sum(kind in name for name in names) == (len(names) - 1) // 2
    with pytest.raises(DataError, match="no linear layer of .* ends like 'score'"):
        build(target_modules=["score"])
    config = {"model": {"lora": {}}}
    assert RewardTrainingConfig.model_validate(config).model.lora is not None


def test_published_it_scores_the_same_by_transformers_by_peft_and_in_rl(
    build: Any, tiny_model: Models, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, tmp_path: Path
) -> None:
    model = fill(build())
    directory = published(model, tokenizer, mesh, tmp_path)
    settings = json.loads((directory / ADAPTER_DIR / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    merged, findings = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not findings["missing_keys"] and not findings["unexpected_keys"]
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1)
    by_peft = peft.PeftModel.from_pretrained(base, str(directory / ADAPTER_DIR)).eval()
    by_peft.config.pad_token_id = merged.config.pad_token_id
    with torch.no_grad():
        ours = scores(model)
        for theirs in (merged.eval(), by_peft):
            found = [theirs(torch.from_numpy(s.token_ids)[None].long()).logits.item() for s in ragged_samples()]
            np.testing.assert_allclose(ours.numpy(), found, rtol=1e-4, atol=1e-4)
    in_rl = RewardModel(str(directory), TrainedModelConfig(name=str(tiny_model())), mesh)
    np.testing.assert_allclose(in_rl.score(ragged_samples(), row_tokens=64), ours.numpy(), rtol=1e-4, atol=1e-4)


def test_the_base_is_the_weights_without_the_head_which_checkpoints_hold(
    build: Any, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, tmp_path: Path
) -> None:
    """What is trained does not change the digest; adapters and head are a warm start of another run."""
    model = build()
    before = Adapters(model.hf_model, TensorLayout(model.hf_model, None), base_name="base").base.digest
    fill(model)
    directory = published(model, tokenizer, mesh, tmp_path)
    assert read_base(directory / ADAPTER_DIR).digest == before
    wanted = copied(trained_tensors(model.hf_model))
    other = build(seed=4)
    fresh = trained_tensors(other.hf_model)
    assert not same(copied(fresh), wanted)
    load_weights_only(fresh, directory / ADAPTER_DIR)
    assert same(copied(fresh), wanted)
    resumed = build(seed=0, weights=False)  # as for a checkpoint, which has no base
    load_weights_only(trained_tensors(resumed.hf_model), directory / ADAPTER_DIR)
    with torch.no_grad():
        torch.testing.assert_close(scores(resumed), scores(model), rtol=0, atol=0)
