"""Which models can be computed in slices of their rows, and which tokens are whose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from holdfast.config import SftConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.mesh import Mesh, SequenceGroup
from holdfast.trainer.model.context_parallel import RowSlice, reason_against
from holdfast.trainer.model.policy import build_policy
from tests.models.families import FAMILIES, write_model

Models = Callable[..., Path]


def group(size: int, rank: int = 0) -> SequenceGroup:
    """Return one whose collectives are not called."""
    world = dist.group.WORLD
    assert world is not None
    return SequenceGroup(rank, size, world)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("falcon_h1", "its tokens meet outside of attention"),
        ("bloom", "its layers do not use transformers' attention interface"),
        ("llama4_text", "what its tokens see depends on more than a sliding window"),
    ],
)
def test_families_whose_tokens_meet_elsewhere_are_refused(name: str, why: str, mesh: Mesh, tmp_path: Path) -> None:
    directory = write_model(next(one for one in FAMILIES if one.name == name), tmp_path / "model", seed=2)
    policy = build_policy(TrainedModelConfig(name=str(directory)), mesh, seed=0)
    policy.share_rows(None)
    with pytest.raises(DataError, match=rf"parallel\.sequence_parallel = 2: .* in slices of its rows: {why}"):
        policy.share_rows(group(2))


@pytest.mark.parametrize(
    ("fields", "attention", "size", "why"),
    [
        ({}, "packed", 3, "its attention has 4 heads, which 3 ranks cannot share evenly"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, "packed", 4, "has 6 heads of keys and values"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "packed", 2, "rotary"),
        ({}, "sdpa", 2, "would need a mask"),
        ({}, "flash_attention_2", 2, "only packed attention is computed so"),
    ],
)
def test_what_cannot_be_sliced_is_refused(
    fields: dict[str, Any], attention: str, size: int, why: str, tiny_model: Models, mesh: Mesh
) -> None:
    policy = build_policy(TrainedModelConfig(name=str(tiny_model(**fields))), mesh, seed=0)
    if attention != "packed":
        # Of another implementation the layout is known without its kernels, which are not installed.
        policy.layout = type(policy.layout)(attention != "sdpa", attention, "" if attention != "sdpa" else why)
    with pytest.raises(DataError, match=why):
        policy.share_rows(group(size))


def test_compiled_layers_are_refused() -> None:
    settings = {"model": {"compile": True}, "parallel": {"num_ranks": 2, "sequence_parallel": 2}}
    with pytest.raises(ValidationError, match=r"model\.compile does not go with parallel\.sequence_parallel"):
        SftConfig.model_validate({"output_dir": "run", **settings})


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "fits"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 2, 8, True), (8, 8, 16, False), (12, 6, 4, False), (6, 2, 4, False)],
)
def test_heads_are_shared_evenly_or_repeated(heads: int, key_heads: int, ranks: int, fits: bool) -> None:
    assert (reason_against(heads, key_heads, ranks) == "") == fits


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_every_token_is_one_ranks(length: int) -> None:
    rows_BL = torch.arange(1, 2 * length + 1).view(2, length)
    index_N = torch.randperm(2 * length)[: length + 1]
    owned = list[int]()
    for rank in range(4):
        row = RowSlice(group(4, rank), length)
        part_BT = row.of(rows_BL)
        assert part_BT.shape == (2, row.width) and row.width * 4 >= length > (row.width - 1) * 4
        own_O = row.own(index_N)
        assert torch.equal(part_BT.flatten()[row.places(index_N)], rows_BL.flatten()[index_N[own_O]])
        owned += own_O.tolist()
    assert sorted(owned) == list(range(length + 1))
