"""Weights of a directory are read in parts where that gives what transformers loads, and else as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model import build
from holdfast.trainer.model.build import filler, initial_weights, load_model_config, trained_tensors
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.model.value_model import build_scalar_model
from tests.models.families import FAMILIES, write_model

Models = Callable[..., Path]


@pytest.fixture
def made_whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which directories were read as a whole."""
    noted = list[str]()

    def noting(hf_model: Any, config: TrainedModelConfig, mesh: Mesh, *, make_whole: Any, **others: Any) -> Any:
        def make() -> Any:
            noted.append(config.name)
            return make_whole()

        return filler(hf_model, config, mesh, make_whole=make, **others)

    for module in ("policy", "value_model"):
        monkeypatch.setattr(f"holdfast.trainer.model.{module}.filler", noting)
    return noted


def check(directory: Path, mesh: Mesh, **settings: Any) -> None:
    """Compare a policy with what transformers loads."""
    config = TrainedModelConfig.model_validate({"name": str(directory)} | settings)
    mine = trained_tensors(build_policy(config, mesh, seed=0).hf_model)
    theirs = initial_weights(config, load_model_config(config.name), seed=0)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek_v3", "falcon_h1", "bloom"])
def test_families_are_read_in_parts(name: str, mesh: Mesh, tmp_path: Path, made_whole: list[str]) -> None:
    check(write_model(next(one for one in FAMILIES if one.name == name), tmp_path / "model", seed=2), mesh)
    assert not made_whole


def test_several_files_are_read_in_parts(tiny_model: Models, mesh: Mesh, tmp_path: Path, made_whole: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="20kB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    check(tmp_path / "model", mesh)
    assert not made_whole
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(DataError, match="index.json is not JSON"):
        check(tmp_path / "model", mesh)


def test_names_without_the_prefix_of_the_model_are_read_in_parts(
    tiny_model: Models, mesh: Mesh, tmp_path: Path, made_whole: list[str]
) -> None:
    """As files of a decoder without its head have them."""
    shutil.copytree(tiny_model(), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    check(tmp_path / "model", mesh)
    assert not made_whole


def beside_an_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')


def with_a_copy_of_the_head(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def with_the_head_alone(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [beside_an_index, with_a_copy_of_the_head, with_the_head_alone])
def test_what_transformers_decides_is_read_by_transformers(
    change: Callable[[Path], None], tiny_model: Models, mesh: Mesh, tmp_path: Path, made_whole: list[str]
) -> None:
    shutil.copytree(tiny_model(), tmp_path / "model")
    change(tmp_path / "model")
    check(tmp_path / "model", mesh)
    assert made_whole == [str(tmp_path / "model")]


def test_files_beside_an_adapter_are_not_read_in_parts(tiny_model: Models, mesh: Mesh, tmp_path: Path) -> None:
    """transformers loads the adapter into the model."""
    shutil.copytree(tiny_model(), tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(str(tmp_path / "model")))
    with pytest.raises(build._CannotRead, match="adapter"):
        build._open(model, str(tmp_path / "model"), without=())


def test_a_new_head_and_adapters_are_the_same_either_way(
    tiny_model: Models, mesh: Mesh, made_whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainedModelConfig.model_validate({"name": str(tiny_model()), "lora": {"rank": 2}})
    in_parts = build_scalar_model(config, mesh, seed=3).hf_model.state_dict()
    assert not made_whole
    monkeypatch.setattr(build, "weight_files", lambda _: [])
    as_a_whole = build_scalar_model(config, mesh, seed=3).hf_model.state_dict()
    assert len(made_whole) == 1
    assert in_parts.keys() == as_a_whole.keys()
    assert all(torch.equal(tensor, as_a_whole[name]) for name, tensor in in_parts.items())
