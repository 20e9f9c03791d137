"""Published weights: directories that others load with equal logits, by the names of the original."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import CheckpointError, DataError
from holdfast.inference.weight_files import BaseWeights, read_architecture, read_weights
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import NAMES_NAME
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.commit import Identity
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.export import Export, export
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model import safetensors_files
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.model_config import load_model_config
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout, names_in_files
from tests.builders.train_states import local_part
from tests.conftest import ModelFactory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": 16, "num_key_value_heads": 4,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "qwen3": {},
    "llama": {},
}  # fmt: skip
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
TIED = ("gpt2", "qwen3")
GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"
PER_EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
Publish = Callable[..., tuple[Path, Policy]]
PublisherOf = Callable[..., tuple[WeightPublisher, Policy]]


@pytest.fixture
def publisher_of(mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> PublisherOf:
    """Return a maker of (publisher, its policy), changed since the directory `model` was loaded."""

    def make(
        model: Path, *, dtype: str = "float32", layout: str = "original", **fields: Any
    ) -> tuple[WeightPublisher, Policy]:
        config = TrainedModelConfig.model_validate({"name": str(model), "dtype": dtype, **fields})
        policy = build_policy(config, mesh, seed=0)
        with torch.no_grad():
            for parameter in policy.parameters():
                local_part(parameter).mul_(1.25)
        names = names_in_files(str(model)) if layout == "original" else None
        tensors = TensorLayout(policy.hf_model, names)
        return WeightPublisher(RunDir(tmp_path), policy, tokenizer, mesh, dtype=dtype, layout=tensors), policy

    return make


@pytest.fixture
def publish(publisher_of: PublisherOf) -> Publish:
    """Return a maker of (published directory, its policy)."""

    def make(model: Path, **settings: Any) -> tuple[Path, Policy]:
        publisher, policy = publisher_of(model, **settings)
        return publisher.publish(3), policy

    return make


def tensors_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def without_prefix(model: Path, prefix: str, target: Path) -> Path:
    """Copy a model as the files of base models call its tensors, those of GPT-2 on the hub for one."""
    shutil.copytree(model, target)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors_of(model).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def original_of(family: str, tiny_model: ModelFactory, tmp_path: Path) -> Path:
    model = tiny_model(family, tied=family in TIED, **FAMILIES[family])
    return without_prefix(model, "transformer.", tmp_path / "original") if family == "gpt2" else model


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_and_shapes_are_the_originals_and_load_bit_for_bit(
    family: str, publish: Publish, tiny_model: ModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 20_000)  # groups are cut by the borders of files
    model = original_of(family, tiny_model, tmp_path)
    directory, policy = publish(model)
    original, published = tensors_of(model), tensors_of(directory)
    assert {name: one.shape for name, one in published.items()} == {name: one.shape for name, one in original.items()}
    for name, tensor in original.items():
        if tensor.is_floating_point() and "e_score_correction_bias" not in name:  # a buffer, which was not changed
            torch.testing.assert_close(published[name], tensor * 1.25, rtol=1e-6, atol=0)
    loaded, findings = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not findings["missing_keys"] and not findings["unexpected_keys"] and not findings["mismatched_keys"]
    assert type(loaded) is type(policy.hf_model) and loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings is (family in TIED)
    expected, found = trained_tensors(policy.hf_model), trained_tensors(loaded)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, local_part(expected[name])), name
    if family in TIED:
        assert torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)


@pytest.mark.parametrize(("family", "extra"), [
    ("gpt2", {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "h.1.attn.bias": torch.ones(1, 1, 4, 4)}),
    ("llama", {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ("deepseek_v3", {"model.layers.61.mlp.up_proj.weight": torch.ones(3, 3)}),
])  # fmt: skip
def test_an_engine_does_not_ask_for_what_transformers_leaves_out_of_the_original(
    family: str, extra: dict[str, Tensor], publish: Publish, tiny_model: ModelFactory, tmp_path: Path
) -> None:
    model = original_of(family, tiny_model, tmp_path)
    with_extra = tmp_path / "with_extra"
    shutil.copytree(model, with_extra)
    names = tensors_of(model).keys()
    save_file(tensors_of(model) | extra, with_extra / "model.safetensors", metadata={"format": "pt"})
    directory, _ = publish(with_extra)
    architecture = read_architecture(with_extra)
    assert architecture.ignored == extra.keys() and tensors_of(directory).keys() == names
    assert BaseWeights(with_extra, architecture).digest == BaseWeights(model, read_architecture(model)).digest
    assert read_weights(directory, architecture, dtype=torch.float32, version=3).tensors.keys() == names
    read_weights(with_extra, architecture, dtype=torch.float32)
    name = min(names - {"lm_head.weight"})
    others = {one: tensor for one, tensor in tensors_of(directory).items() if one != name}
    save_file(others, tmp_path / "lacking.safetensors")
    with pytest.raises(DataError, match=rf"'{name}' is missing \(1 of"):
        read_weights(tmp_path, architecture, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_without_an_original_names_are_transformers(family: str, publish: Publish, tiny_model: ModelFactory) -> None:
    bare = tiny_model(family, tied=False, weights=False, **FAMILIES[family])
    directory, _ = publish(bare, layout="none", init="random")
    names = tensors_of(tiny_model(family, tied=False, **FAMILIES[family])).keys()
    assert tensors_of(directory).keys() == names
    assert read_architecture(bare).shapes.keys() == names, "an engine that waits for its first weights expects the same"


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_warm_starts_take_published_files_exactly(
    family: str, is_sharded: bool, publish: Publish, tiny_model: ModelFactory, mesh: Mesh, tmp_path: Path
) -> None:
    directory, policy = publish(original_of(family, tiny_model, tmp_path))
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    if is_sharded:
        fully_shard(causal_lm, mesh=mesh.device_mesh)
    tensors = trained_tensors(causal_lm)
    for tensor in tensors.values():
        local_part(tensor).fill_(-7)
    load_weights_only(tensors, directory, layout=TensorLayout(causal_lm, None))
    for name, expected in trained_tensors(policy.hf_model).items():
        assert torch.equal(local_part(tensors[name]), local_part(expected)), name


def test_a_file_that_lacks_one_expert_is_no_warm_start(publish: Publish, tiny_model: ModelFactory) -> None:
    directory, policy = publish(tiny_model("qwen3_moe", tied=False, **EXPERTS))
    tensors = tensors_of(directory)
    layout, path = TensorLayout(policy.hf_model, None), directory.with_name("lacking.safetensors")
    for name, reason in ((PER_EXPERT, r"experts.down_proj is \(3, "), (GATE, "do not make one of this model")):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
        with pytest.raises(CheckpointError, match=reason):
            load_weights_only(trained_tensors(policy.hf_model), path, layout=layout)


def test_what_files_call_otherwise_is_found_and_exported_likewise(tiny_model: ModelFactory, tmp_path: Path) -> None:
    """No family with a plain linear layer of another name is small, so names are made other ones here."""
    model = without_prefix(tiny_model("llama", tied=False), "model.", tmp_path / "original")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    layout = TensorLayout(loaded, names_in_files(str(model)))
    assert layout.name_in_files("model.layers.0.self_attn.q_proj.weight") == "layers.0.self_attn.q_proj.weight"
    assert dict(layout.to_files(trained_tensors(loaded).items())).keys() == tensors_of(model).keys()
    files = {f"model/{path.name}": path.read_bytes() for path in model.iterdir() if path.suffix != ".safetensors"}
    identity = Identity(files=files | {f"model/{NAMES_NAME}": msgspec.json.encode(layout.names)})
    with Checkpointer(tmp_path / "checkpoints", {"model": loaded}, identity=identity) as checkpointer:
        checkpointer.save(1)
    exported = tmp_path / "exported"
    export(Export(tmp_path / "checkpoints/step_1", exported))
    assert tensors_of(exported).keys() == tensors_of(model).keys()


def test_experts_are_not_whole_matrices_of_files(tiny_model: ModelFactory) -> None:
    config = load_model_config(str(tiny_model("qwen3_moe", tied=False, **EXPERTS)))
    with torch.device("meta"):
        layout = TensorLayout(AutoModelForCausalLM.from_config(config), None)
    assert layout.name_in_files("model.layers.0.mlp.experts.down_proj") is None
    assert layout.name_in_files("model.norm.weight") == "model.norm.weight"
    assert PER_EXPERT in layout.names and not layout.is_plain


def test_where_names_come_from(tiny_model: ModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", tied=False)
    expected = names_in_files(str(model))
    assert expected == sorted(tensors_of(model))
    shards, hub = tmp_path / "shards", tmp_path / "hub"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(shards, max_shard_size="20KB")
    assert not (shards / "model.safetensors").exists() and names_in_files(str(shards)) == expected
    for name, source in (("single", model), ("sharded", shards), ("empty", tiny_model("llama", weights=False))):
        cached = hub / f"models--someone--{name}"
        shutil.copytree(source, cached / "snapshots" / ("c" * 40))
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text("c" * 40)
    for module in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(hub))
    assert [names_in_files(f"someone/{name}") for name in ("single", "sharded", "empty")] == [expected, expected, None]
    (shards / "model.safetensors.index.json").write_text("{")
    with pytest.raises(DataError, match="the names of its tensors cannot be read"):
        names_in_files(str(shards))


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"], ids=["lost", "transposed"])
def test_a_lossy_layout_is_refused(name: str, tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from_files = TensorLayout.from_files

    def spoilt(layout: TensorLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = from_files(layout, tensors)
        tensor = found.pop(name)
        return found | ({name: tensor.T} if tensor.ndim == 2 else {})

    monkeypatch.setattr(TensorLayout, "from_files", spoilt)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(str(tiny_model("llama", tied=False))))
    with pytest.raises(DataError, match=rf"{name} would not come back from the files \(1 such tensors\)"):
        TensorLayout(model, None)


def test_bfloat16_weights_are_the_rounded_masters(publisher_of: PublisherOf, tiny_model: ModelFactory) -> None:
    publisher, policy = publisher_of(tiny_model(), dtype="bfloat16")
    directory = publisher.publish(1)
    expected = {name: local_part(tensor) for name, tensor in trained_tensors(policy.hf_model).items()}
    saved = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in saved.items())
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_buffers_are_computed_published_and_exported_as_they_are(
    family: str, publisher_of: PublisherOf, tiny_model: ModelFactory, tmp_path: Path
) -> None:
    """Routers add the correction bias in float32; in bfloat16 numbers around 5 are rounded by up to 0.016. One of both
    has a parameter for it."""
    publisher, policy = publisher_of(tiny_model(family, tied=False, **FAMILIES.get(family, ERNIE)), dtype="bfloat16")
    buffers = dict(policy.hf_model.named_buffers())
    (bias, *_) = (one for name, one in buffers.items() if name.endswith("e_score_correction_bias"))
    bias.copy_(torch.tensor([5.5, 5.51, 5.52, 5.53]))
    published = tensors_of(publisher.publish(1))
    biases = {key: one for key, one in published.items() if key.endswith("e_score_correction_bias")}
    assert torch.equal(next(iter(biases.values())), bias)
    assert {one.dtype for key, one in published.items() if key not in biases} == {torch.bfloat16}
    described = {f"model/{key}": content for key, content in publisher.config_files.items()}
    identity = Identity(files=described | {f"model/{NAMES_NAME}": msgspec.json.encode(list(published))})
    with Checkpointer(tmp_path / "checkpoints", {"model": policy.hf_model}, identity=identity) as checkpointer:
        checkpointer.save(1)
    export(Export(tmp_path / "checkpoints/step_1", tmp_path / "exported", dtype="bfloat16"))
    exported = tensors_of(tmp_path / "exported")
    assert exported.keys() == published.keys()
    assert all(exported[key].dtype == one.dtype and torch.equal(exported[key], one) for key, one in published.items())


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)], ids=["open", "private"])
def test_weights_follow_the_umask(publisher_of: PublisherOf, tiny_model: ModelFactory, mask: int, mode: int) -> None:
    publisher, _ = publisher_of(tiny_model())
    before = os.umask(mask)
    try:
        directory = publisher.publish(1)
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}
    assert files["model.safetensors"] == mode
    assert all(found & 0o044 == mode & 0o044 for found in files.values()), files


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}], ids=["plain", "scaled"])
def test_settings_of_rotary_embeddings_keep_the_names_that_older_readers_know(
    scaling: dict[str, Any] | None, publisher_of: PublisherOf, tiny_model: ModelFactory, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    settings = json.loads((model / "config.json").read_bytes())
    del settings["rope_parameters"]
    (model / "config.json").write_text(json.dumps(settings | {"rope_theta": 5e5, "rope_scaling": scaling}))
    publisher, policy = publisher_of(model)
    published = json.loads(publisher.config_files["config.json"])
    assert (published["rope_theta"], published["rope_scaling"]) == (5e5, scaling)
    assert AutoConfig.from_pretrained(publisher.publish(1)).rope_parameters == policy.hf_model.config.rope_parameters


def test_versions_bring_what_is_beside_the_weights_are_replaced_by_the_same_and_pruned(
    publisher_of: PublisherOf, tiny_model: ModelFactory, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    generation = {"eos_token_id": [7, 5], "temperature": 0.5}  # transformers would not save it
    (model / "generation_config.json").write_text(json.dumps(generation))
    tokenizer.eos_token, end = "<|pad|>", tokenizer.eos_token
    try:
        publisher, _ = publisher_of(model)
    finally:
        tokenizer.eos_token = end
    _, directory, *_ = (publisher.publish(version) for version in (0, 1, 2, 10))
    # The model's own end tokens, the token that ends a text, and the token with which the template ends a turn.
    ends = [7, 5, *sorted(tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"]))]
    assert json.loads((directory / "generation_config.json").read_text()) == generation | {"eos_token_id": ends}
    loaded = AutoTokenizer.from_pretrained(directory)
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token == "<|pad|>"
    (directory / "model.safetensors").write_bytes(b"damaged")
    assert publisher.publish(1) == directory
    manifest.verify(directory)
    assert atomic.clear_leftovers(directory.parent) == []
    publisher.prune({1, 10, 99})
    assert RunDir(tmp_path).published_weights() == [1, 10]
