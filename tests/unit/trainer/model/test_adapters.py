"""An adapter in the engine: the same merged weights as the trainer's, bit for bit, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.inference.weight_files import BaseWeights, read_adapter, read_architecture, read_weights
from holdfast.run.manifest import MANIFEST_NAME
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_CONFIG_NAME, ADAPTER_NAME, BASE_NAME, weights_digest
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.lora import Adapters
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout

MATRIX = "model.layers.0.self_attn.q_proj.weight"
FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Publish = Callable[..., tuple[Path, Path, Path]]


@pytest.fixture
def publish(tiny_model: Callable[..., Path], mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Publish:
    """Return a maker of (model directory, merged weights, adapter alone), all of one policy."""

    def make(*, tied: bool = True, dtype: str = "float32") -> tuple[Path, Path, Path]:
        model = tiny_model(tied=tied)
        config = {"name": str(model), "dtype": dtype, "lora": {"rank": 3, "alpha": 5.0}}
        policy = build_policy(TrainedModelConfig.model_validate(config), mesh, seed=0)
        adapters = Adapters(policy.hf_model, TensorLayout(policy.hf_model, None), base_name=str(model))
        with torch.no_grad():
            for factor in trained_tensors(policy.hf_model).values():
                factor.normal_()
        publisher = WeightPublisher(RunDir(tmp_path), policy, tokenizer, mesh, dtype=dtype, adapters=adapters)
        return model, publisher.publish(1), publisher.publish(2, for_engines=True)

    return make


def base_of(model: Path) -> BaseWeights:
    return BaseWeights(model, read_architecture(model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
def test_an_engine_merges_as_the_trainer_does(publish: Publish, tied: bool, engine: torch.dtype) -> None:
    model, merged, adapter = publish(tied=tied)
    base = base_of(model)
    for _ in range(2):  # the base is as it was
        ours = read_adapter(adapter, base, dtype=engine, version=2)
        theirs = read_weights(merged, base.architecture, dtype=engine, version=1)
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            assert ours.tensors[name].dtype == engine and torch.equal(ours.tensors[name], tensor), name
    assert ours.digest == weights_digest(adapter)
    untouched = read_weights(model, base.architecture, dtype=engine).tensors
    assert not torch.equal(untouched[MATRIX], ours.tensors[MATRIX])


def test_an_adapter_for_other_weights_is_refused(publish: Publish, tiny_model: Callable[..., Path]) -> None:
    model, _, adapter = publish()
    with pytest.raises(DataError, match=rf"adapter for the weights of '{model}' .* this server has those of"):
        read_adapter(adapter, base_of(tiny_model(seed=1)), dtype=torch.float32)
    with pytest.raises(DataError, match=r"holds no \*.safetensors file, and an adapter is added to what lies there"):
        base_of(tiny_model(weights=False))


def test_another_version_or_a_damaged_file_is_refused(publish: Publish) -> None:
    model, _, adapter = publish()
    base = base_of(model)
    with pytest.raises(DataError, match="holds policy version 2 .* pushed as version 3"):
        read_adapter(adapter, base, dtype=torch.float32, version=3)
    settings = adapter / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 5.0', '"lora_alpha": 7.0'))
    with pytest.raises(DataError, match=r"adapter_config.json is damaged"):
        read_adapter(adapter, base, dtype=torch.float32, version=2)


def test_factors_that_do_not_fit_the_model_are_refused_by_name(publish: Publish) -> None:
    model, _, adapter = publish()
    base = base_of(model)
    (adapter / MANIFEST_NAME).unlink()
    whole = load_file(adapter / ADAPTER_NAME)

    def refused(message: str, **changes: torch.Tensor) -> None:
        tensors = {name: tensor for name, tensor in (whole | changes).items() if tensor.numel()}
        save_file(tensors, adapter / ADAPTER_NAME)
        with pytest.raises(DataError, match=message):
            read_adapter(adapter, base, dtype=torch.float32)

    refused(r"q_proj.lora_A.weight' is missing", **{FACTOR: torch.empty(0)})
    refused(r"'model.layers.0.self_attn.q_proj.weight' have the shapes \[3, 31\]", **{FACTOR: torch.ones(3, 31)})
    refused(r"holds NaN or infinity", **{FACTOR: torch.full((3, 32), torch.inf)})
    refused(r"'extra' is no factor", extra=torch.ones(1))
    both = {f"nowhere.lora_{factor}.weight": torch.ones(1, 1) for factor in "AB"}
    refused(r"'nowhere.weight', which it adapts, is not part of the model", **both)
    save_file(whole, adapter / ADAPTER_NAME)
    described = json.loads((adapter / BASE_NAME).read_text())
    (adapter / BASE_NAME).unlink()
    with pytest.raises(DataError, match="base.json is missing"):
        read_adapter(adapter, base, dtype=torch.float32)
    (adapter / BASE_NAME).write_text(json.dumps(described))
    read_adapter(adapter, base, dtype=torch.float32)


def test_rank_and_alpha_fit_the_factors_and_stand_in_the_digest(publish: Publish) -> None:
    model, _, adapter = publish()
    base = base_of(model)
    (adapter / MANIFEST_NAME).unlink()
    path = adapter / ADAPTER_CONFIG_NAME
    settings = json.loads(path.read_text())
    digests = set()
    for alpha in (5.0, 7.0):
        path.write_text(json.dumps(settings | {"lora_alpha": alpha}))
        digests.add(read_adapter(adapter, base, dtype=torch.float32).digest)
        assert weights_digest(adapter) in digests
    assert len(digests) == 2, "the same factors, counted more often, are other weights"
    for changes, message in (
        ({"r": 64}, r"do not fit \[\d+, \d+\] and the rank r = 64"),
        ({"r": 0}, "is damaged: r = 0"),
        ({"r": -2}, "is damaged: r = -2"),
        ({"lora_alpha": "x"}, "is damaged"),
        ({"r": [[[]]]}, "is damaged"),
    ):
        path.write_text(json.dumps(settings | changes))
        with pytest.raises(DataError, match=message):
            read_adapter(adapter, base, dtype=torch.float32)
    path.write_text(json.dumps(settings))
    factors = load_file(adapter / ADAPTER_NAME)
    for changed, message in (
        ({FACTOR: torch.ones(32)}, "have the shapes"),
        ({FACTOR: torch.ones(3, 1, 32)}, "have the shapes"),
        ({FACTOR: torch.ones(())}, "have the shapes"),
        ({FACTOR: torch.ones(3, 32, dtype=torch.int32)}, "which is no float"),
    ):
        save_file(factors | changed, adapter / ADAPTER_NAME)
        with pytest.raises(DataError, match=message):
            read_adapter(adapter, base, dtype=torch.float32)
    save_file({}, adapter / ADAPTER_NAME)
    with pytest.raises(DataError, match="adapts nothing"):
        read_adapter(adapter, base, dtype=torch.float32)
