"""What the index of a torch.distributed.checkpoint directory says, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.shared.errors import CheckpointError
from holdfast.trainer.checkpoints.index import IndexReader
from holdfast.trainer.mesh import Mesh


@pytest.fixture
def mixed(tmp_path: Path, mesh: Mesh) -> Path:
    """Return a directory with a tensor and an object."""
    torch_dcp.save({"weight": torch.ones(2, 3), "note": "of another loop"}, checkpoint_id=tmp_path / "mixed")
    return tmp_path / "mixed"


def test_tensors_are_found_among_other_objects(mixed: Path) -> None:
    found = IndexReader(mixed).tensors()
    assert {name: tuple(entry.size) for name, entry in found.items()} == {"weight": (2, 3)}


def test_a_checkpoint_with_other_objects_than_tensors_is_none_of_ours(mixed: Path) -> None:
    with pytest.raises(CheckpointError, match="mixed holds objects that are not tensors: note"):
        IndexReader(mixed).only_tensors()


def test_an_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"/\.metadata cannot be read"):
        IndexReader(tmp_path).tensors()
