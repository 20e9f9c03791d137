"""Families that cannot be packed, and those with a head of their own, on two ranks as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.trainer.mesh import Mesh
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, random_samples, reference_outcome, write_model
from tests.ranks.families import LENGTHS, compute


@pytest.mark.parametrize("name", ["falcon_h1", "falcon"])
def test_two_ranks_compute_what_plain_transformers_does(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """Falcon-H1 has recurrent layers and scales its logits; Falcon chooses its attention when it is built."""
    family = next(family for family in FAMILIES if family.name == name)
    model_dir = write_model(family, tmp_path / "model", seed=2)
    shared_commands().two_ranks("tests.ranks.families", tmp_path, model_dir)
    one = compute(model_dir, mesh)
    plain = reference_outcome(model_dir, random_samples(LENGTHS, seed=1))
    assert float(one["loss"]) == pytest.approx(plain.loss, abs=1e-5)
    for rank in (0, 1):
        two = torch.load(tmp_path / f"rank_{rank}.pt")
        assert two.keys() == one.keys()
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5, msg=key)
