"""Two ranks that load a checkpoint of Hugging Face read its tensors once between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.config.training import TrainedModelConfig
from holdfast.trainer.model.build import initial_weights, load_model_config
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, write_model

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("name", "read_whole"), [("qwen3", ()), ("qwen3_moe", ("experts",))])
def test_each_rank_reads_its_part(name: str, read_whole: tuple[str, ...], tmp_path: Path) -> None:
    """Experts are one tensor of a layer in memory and many in files: each rank makes the whole, and keeps its part."""
    family = next(family for family in FAMILIES if family.name == name)
    model_dir = write_model(family, tmp_path / "model", seed=2)
    directory = tmp_path / "ranks"
    directory.mkdir()
    shared_commands().two_ranks("tests.ranks.initial_weights", directory, model_dir)
    config = TrainedModelConfig(name=str(model_dir))
    whole = initial_weights(config, load_model_config(config.name), seed=0)
    ranks = [torch.load(directory / f"rank_{rank}.pt") for rank in (0, 1)]
    for rank in ranks:
        assert rank["weights"].keys() == whole.keys()
        assert all(torch.equal(rank["weights"][key], tensor) for key, tensor in whole.items())
    first, second = (rank["read"] for rank in ranks)
    split = {key for key in first.keys() | second.keys() if not any(part in key for part in read_whole)}
    assert len(split) > 10
    for key in split:
        assert first.get(key, 0) + second.get(key, 0) == whole[key].numel(), key
        assert first.get(key, 0) <= whole[key].numel() // 2 + whole[key][0].numel(), key
    assert sum(first[key] for key in first.keys() - split) == sum(
        tensor.numel() for key, tensor in whole.items() if any(part in key for part in read_whole)
    )
