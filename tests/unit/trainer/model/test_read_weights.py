"""Weights and adapters as an engine reads them: digest, shards, dtypes, merged as by the trainer, or a refusal."""

import json
import math
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.inference import weight_files
from holdfast.inference.weight_files import Architecture, BaseWeights, read_adapter, read_architecture, read_weights
from holdfast.run.manifest import MANIFEST_NAME
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_CONFIG_NAME, ADAPTER_NAME, BASE_NAME, read_base, weights_digest
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.lora import Adapters
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import TensorLayout, names_in_files
from tests.builders.train_states import fill
from tests.conftest import ModelFactory
from tests.models.served import write_model

ARCHITECTURE = Architecture(shapes={"a": (2, 3), "b": (4,)}, tied=False)


def _shards(directory: Path, *, dtype: torch.dtype = torch.float32) -> None:
    save_file({"a": torch.full((2, 3), 1.25, dtype=dtype)}, directory / "model-2.safetensors")
    save_file({"b": torch.arange(4).to(dtype)}, directory / "model-10.safetensors")


def _refused(path: Path, message: str, *, dtype: torch.dtype = torch.float32, of: Architecture = ARCHITECTURE) -> None:
    with pytest.raises(DataError, match=message):
        read_weights(path, of, dtype=dtype)


def test_the_digest_is_what_it_is_defined_to_be(tmp_path: Path) -> None:
    _shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    lines = b""
    for name in ("model-10.safetensors", "model-2.safetensors"):
        content = (tmp_path / name).read_bytes()
        lines += f"{name}\0{len(content)}\0{xxhash.xxh3_128_hexdigest(content)}\n".encode()
    expected = xxhash.xxh3_128_hexdigest(lines)
    assert weights_digest(tmp_path) == expected
    assert read_weights(tmp_path, ARCHITECTURE, dtype=torch.float32).digest == expected
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-3.safetensors")
    assert weights_digest(tmp_path) != expected
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(DataError, match="no .*safetensors"):
        weights_digest(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
def test_matrices_come_in_the_dtype_of_the_engine(tmp_path: Path, stored: torch.dtype, engine: torch.dtype) -> None:
    """vLLM holds some vectors in float32, such as the correction bias of experts: they come as they are."""
    _shards(tmp_path, dtype=stored)
    tensors = read_weights(tmp_path, ARCHITECTURE, dtype=engine).tensors
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"a": engine, "b": stored}
    assert torch.equal(tensors["a"].float(), torch.full((2, 3), 1.25))
    assert torch.equal(tensors["b"].float(), torch.arange(4).float())


def test_weights_in_another_dtype_do_not_hold_the_file_in_memory(tmp_path: Path) -> None:
    save_file({"a": torch.full((2, 3), 1.25), "b": torch.arange(4.0)}, tmp_path / "model.safetensors")
    tensors = read_weights(tmp_path, ARCHITECTURE, dtype=torch.bfloat16).tensors
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())


def test_the_tensors_of_a_file_are_the_bytes_that_were_read(tmp_path: Path) -> None:
    save_file({"a": torch.full((2, 3), 1.25), "b": torch.arange(4.0)}, path := tmp_path / "model.safetensors")
    tensors = read_weights(tmp_path, ARCHITECTURE, dtype=torch.float32).tensors
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1  # not copied
    content = path.read_bytes()
    header, data = json.loads(content[8 : -10 * 4]), content[-10 * 4 :]

    def write(text: str, more: bytes = b"") -> None:
        text += " " * (-len(text.encode()) % 8)
        path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data + more)

    for spaces in range(9):  # at any place in the file
        text = json.dumps(header) + " " * spaces
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
        read = read_weights(tmp_path, ARCHITECTURE, dtype=torch.float32).tensors
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    for change in (
        {"shape": [-1]}, {"shape": [5]}, {"shape": 4}, {"data_offsets": [20, 40]}, {"data_offsets": [24, 36]},
        {"data_offsets": [24, 44]}, {"data_offsets": [24]}, {"dtype": "F16"}, {"dtype": "F8"},
    ):  # fmt: skip
        write(json.dumps(header | {"b": header["b"] | change}))
        _refused(tmp_path, "is not a whole safetensors file")
    for text, more in (
        (json.dumps(header), b"1234"), ("[]", b""), (json.dumps(header)[:-1], b""),
        (json.dumps(header | {"__metadata__": 3}), b""), (json.dumps(header | {"__metadata__": {"format": 3}}), b""),
    ):  # fmt: skip
        write(text, more)
        _refused(tmp_path, "is not a whole safetensors file")


@pytest.mark.parametrize("dtype", weight_files.FLOATS.values())
def test_a_number_that_is_none_is_found_anywhere(dtype: torch.dtype) -> None:
    model = Architecture({"b": (1003,), "empty": (0, 3)}, tied=False)
    weight_files.checked("files", "empty", torch.zeros(0, 3, dtype=dtype), model, dtype)
    for value, place in product((math.nan, math.inf, -math.inf), (0, 7, 512, 1002)):
        tensor = torch.randn(1003).to(dtype)
        weight_files.checked("files", "b", tensor, model, dtype)
        tensor[place] = value
        with pytest.raises(DataError, match="files: tensor 'b' holds NaN or infinity"):
            weight_files.checked("files", "b", tensor, model, dtype)


def test_a_value_that_the_engine_cannot_hold_and_a_tensor_in_two_files_are_refused(tmp_path: Path) -> None:
    _shards(tmp_path)
    save_file({"b": torch.tensor([3.4e38, 0, 0, 0])}, tmp_path / "model-10.safetensors")
    read_weights(tmp_path, ARCHITECTURE, dtype=torch.float32)
    _refused(tmp_path, "'b' holds NaN or infinity", dtype=torch.bfloat16)
    save_file({"b": torch.zeros(4)}, tmp_path / "model-3.safetensors")
    _refused(tmp_path, "tensor 'b' is also in another file")


def test_tied_weights_may_repeat_the_embedding_but_not_contradict_it(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    architecture = Architecture(shapes={name: (3, 2)}, tied=True)
    embedding = torch.arange(6.0).view(3, 2)
    save_file({name: embedding, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert list(read_weights(tmp_path, architecture, dtype=torch.float32).tensors) == [name]
    save_file({name: embedding, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    _refused(tmp_path, "the model's config ties them", of=architecture)


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_alone_tells_the_same_architecture_as_weights(tmp_path: Path, tied: bool) -> None:
    full = read_architecture(write_model(tmp_path / "full", seed=0, tied=tied))
    assert read_architecture(write_model(tmp_path / "bare", seed=0, tied=tied, weights=False)) == full
    assert full.tied is tied and ("lm_head.weight" in full.shapes) is not tied


def test_a_model_without_memory_leaves_others_their_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on while an update is read, and its tensors get the default dtype of the process."""
    directory = write_model(tmp_path, seed=0, tied=True, weights=False)
    config = json.loads((directory / "config.json").read_text()) | {"dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    set_dtype, seen = torch.set_default_dtype, []

    def note(dtype: torch.dtype) -> None:
        seen.append(dtype)
        set_dtype(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", note)
    assert read_architecture(directory).shapes and set(seen) <= {torch.get_default_dtype()}


@pytest.mark.parametrize(
    "name", ["manifest.json", "model.safetensors.index.json", "base.json", "adapter_config.json", "model-4.safetensors"]
)
def test_only_regular_files_are_opened(tmp_path: Path, name: str) -> None:
    """Whoever opens a pipe waits until somebody writes into it; `/dev/zero` has no end."""
    _shards(tmp_path)
    os.mkfifo(tmp_path / name)
    _refused(tmp_path, f"{name} is a pipe, not a regular file")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    _refused(tmp_path, f"{name} is a device, not a regular file")


def test_files_larger_than_the_weights_can_be_are_not_read(tmp_path: Path) -> None:
    _shards(tmp_path)
    for name, message in (
        ("model-4.safetensors", r"holds 2\d{11} bytes of weights, this model can have \d{8} at most"),
        ("manifest.json", r"manifest.json has 2\d{11} bytes, allowed are \d{8}"),
    ):
        with open(tmp_path / name, "wb") as sparse:
            sparse.truncate(200_000_000_000)
        _refused(tmp_path, message)
        (tmp_path / name).unlink()
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number}": empty for number in range(40_000)})
    (tmp_path / "model-4.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    _refused(tmp_path, r"a header of \d{7} bytes, allowed are \d{7} for 2 tensors")


MATRIX = "model.layers.0.self_attn.q_proj.weight"
FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Publish = Callable[..., tuple[Path, Path, Path]]


@pytest.fixture
def publish(tiny_model: ModelFactory, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Publish:
    """Return a maker of (model directory, merged weights, adapter alone), all of one policy."""

    def make(**fields: Any) -> tuple[Path, Path, Path]:
        model = tiny_model(**fields)
        config = {"name": str(model), "lora": {"rank": 3, "alpha": 5.0}}
        policy = build_policy(TrainedModelConfig.model_validate(config), mesh, seed=0)
        layout = TensorLayout(policy.hf_model, names_in_files(str(model)))
        adapters = Adapters(policy.hf_model, layout, base_name=str(model))
        fill(policy.hf_model)
        publisher = WeightPublisher(
            RunDir(tmp_path), policy, tokenizer, mesh, dtype="float32", layout=layout, adapters=adapters
        )
        return model, publisher.publish(1), publisher.publish(2, for_engines=True)

    return make


def base_of(model: Path) -> BaseWeights:
    return BaseWeights(model, read_architecture(model))


def refused(adapter: Path, base: BaseWeights, message: str, *, version: int | None = None) -> None:
    with pytest.raises(DataError, match=message):
        read_adapter(adapter, base, dtype=torch.float32, version=version)


OTHER_NAMES = {"kind": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "fields", [{}, {"tied": False}, OTHER_NAMES | {"tied": False}], ids=["tied", "untied", "mixtral"]
)
@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
def test_an_engine_merges_as_the_trainer_does(publish: Publish, fields: dict[str, Any], engine: torch.dtype) -> None:
    model, merged, adapter = publish(**fields)
    base = base_of(model)
    assert read_base(adapter).digest == base.digest
    for _ in range(2):  # the base is as it was
        ours = read_adapter(adapter, base, dtype=engine, version=2)
        theirs = read_weights(merged, base.architecture, dtype=engine, version=1)
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            assert ours.tensors[name].dtype == tensor.dtype and torch.equal(ours.tensors[name], tensor), name
    assert ours.digest == weights_digest(adapter)
    assert not torch.equal(read_weights(model, base.architecture, dtype=engine).tensors[MATRIX], ours.tensors[MATRIX])


def test_an_adapter_that_is_damaged_or_of_other_weights_is_refused(publish: Publish, tiny_model: ModelFactory) -> None:
    model, _, adapter = publish()
    refused(adapter, base_of(tiny_model(seed=1)), f"adapter for the weights of '{model}' .* this server has those of")
    with pytest.raises(DataError, match=r"holds no \*.safetensors file, and an adapter is added to what lies there"):
        base_of(tiny_model(weights=False))
    base = base_of(model)
    refused(adapter, base, "holds policy version 2 .* pushed as version 3", version=3)
    settings = adapter / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 5.0', '"lora_alpha": 7.0'))
    refused(adapter, base, "adapter_config.json is damaged", version=2)


def test_a_base_that_somebody_writes_to_has_another_digest(publish: Publish) -> None:
    model, _, adapter = publish()
    base = base_of(model)
    (weights,) = model.glob("*.safetensors")
    content = weights.read_bytes()
    weights.rename(model / "removed")
    read_adapter(adapter, base, dtype=torch.float32)  # what the server has mapped stays
    (model / "removed").rename(weights)
    with weights.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(weights, ns=(1, 1))
    refused(adapter, base, "adapter for the weights of")
    with weights.open("r+b") as file:
        file.write(content)
    read_adapter(adapter, base, dtype=torch.float32)


BOTH = {f"nowhere.lora_{factor}.weight": torch.ones(1, 1) for factor in "AB"}


def test_factors_that_do_not_fit_the_model_are_refused_by_name(publish: Publish) -> None:
    model, _, adapter = publish()
    base = base_of(model)
    (adapter / MANIFEST_NAME).unlink()
    whole = load_file(adapter / ADAPTER_NAME)
    for changed, message in (
        ({FACTOR: None}, "q_proj.lora_A.weight' is missing"),
        ({FACTOR: torch.ones(3, 31)}, r"'model.layers.0.self_attn.q_proj.weight' have the shapes \[3, 31\]"),
        ({FACTOR: torch.ones(32)}, "have the shapes"),
        ({FACTOR: torch.ones(3, 1, 32)}, "have the shapes"),
        ({FACTOR: torch.ones(())}, "have the shapes"),
        ({FACTOR: torch.ones(3, 32, dtype=torch.int32)}, "not a float"),
        ({FACTOR: torch.full((3, 32), torch.inf)}, "holds NaN or infinity"),
        ({"extra": torch.ones(1)}, "'extra' is not a factor"),
        (BOTH, "'nowhere.weight', which it adapts, is not part of the model"),
        (dict.fromkeys(whole), "adapts nothing"),
    ):
        tensors = {name: tensor for name, tensor in (whole | changed).items() if tensor is not None}
        save_file(tensors, adapter / ADAPTER_NAME)
        refused(adapter, base, message)
    save_file(whole, adapter / ADAPTER_NAME)
    described = json.loads((adapter / BASE_NAME).read_text())
    (adapter / BASE_NAME).unlink()
    refused(adapter, base, "base.json is missing")
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
        ({"r": 0}, "cannot be used: r = 0"),
        ({"r": -2}, "cannot be used: r = -2"),
        ({"lora_alpha": "x"}, "cannot be used"),
        ({"r": [[[]]]}, "cannot be used"),
        ({"alpha_pattern": {"q_proj": 64}}, "cannot be used: alpha_pattern = .* one alpha is needed"),
    ):
        path.write_text(json.dumps(settings | changes))
        refused(adapter, base, message)
