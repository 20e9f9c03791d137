"""A mixture of experts through `sft` on two ranks: everything that leaves the run has the names of the original."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from holdfast.run.run_dir import RunDir
from holdfast.trainer.export import Export, TensorReader, export, import_weights
from tests.conftest import ModelFactory
from tests.runs.training import run_sft

pytestmark = [pytest.mark.ranks, pytest.mark.launch]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def model(tiny_model: ModelFactory) -> Path:
    return tiny_model("qwen3_moe", tied=False, **EXPERTS)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, model: Path, sft_data: Path) -> RunDir:
    flags = ("--model.init", "pretrained", "--max-steps", "2", "--ckpt", "--parallel.num-ranks", "2")
    run = run_sft(tmp_path_factory.mktemp("run") / "run", model, sft_data, *flags)
    assert run.code == 0, run.output
    return run.run_dir


def test_sft_publishes_the_originals_names_with_the_values_of_its_checkpoint(run_dir: RunDir, model: Path) -> None:
    published, original = load_file(run_dir.weights_of(2) / NAME), load_file(model / NAME)
    assert {name: one.shape for name, one in published.items()} == {name: one.shape for name, one in original.items()}
    reader = TensorReader(run_dir.checkpoint(2) / "trainer")
    loaded = AutoModelForCausalLM.from_pretrained(run_dir.weights_of(2)).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in loaded
    for name, tensor in loaded.items():
        assert torch.equal(reader.read(f"model.{name}"), tensor), name


def test_export_and_import_keep_names_and_bits(run_dir: RunDir, model: Path, tmp_path: Path) -> None:
    published = run_dir.weights_of(2)
    exported, imported = tmp_path / "exported", tmp_path / "imported"
    export(Export(run_dir.checkpoint(2), exported))
    assert (exported / NAME).read_bytes() == (published / NAME).read_bytes()
    assert sorted(path.name for path in exported.iterdir()) == sorted(path.name for path in published.iterdir())
    for number, source in enumerate((published, run_dir.checkpoint(2))):
        import_weights(source, Path(f"{imported}{number}"))
        assert load_file(Path(f"{imported}{number}") / NAME).keys() == load_file(model / NAME).keys()
        assert (Path(f"{imported}{number}") / NAME).read_bytes() == (published / NAME).read_bytes()
