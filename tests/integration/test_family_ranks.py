"""Families that cannot be packed, and those with a head of their own, on two ranks as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.trainer.mesh import Mesh
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, random_samples, reference_outcome, write_model
from tests.ranks.families import LENGTHS, compute

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("name", "is_sliced"),
    [("falcon_h1", False), ("falcon", False), ("qwen3_next", False), ("qwen3_moe", True), ("gpt_oss", True)],
)
def test_two_ranks_compute_what_plain_transformers_does(name: str, is_sliced: bool, mesh: Mesh, tmp_path: Path) -> None:
    """Divided in every way, or refused. Falcon-H1 has recurrent layers and scales its logits, and Falcon chooses its
    attention when it is built; then there are linear attention, experts, and sinks.
    """
    family = next(family for family in FAMILIES if family.name == name)
    model_dir = write_model(family, tmp_path / "model", seed=2)
    shared_commands().two_ranks("tests.ranks.families", tmp_path, model_dir)
    one = compute(model_dir, mesh)
    plain = reference_outcome(model_dir, random_samples(LENGTHS, seed=1))
    assert float(one["loss"]) == pytest.approx(plain.loss, abs=1e-5)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"rank_{rank}.pt")
        if not is_sliced:
            assert "cannot be computed in slices of its rows" in found.pop("slices")
        for division, two in found.items():
            assert two.keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5, msg=f"{division} {key}")
        assert all(torch.equal(found["offloaded"][key], value) for key, value in found["shards"].items())


def test_a_family_that_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "rwkv")
    shared_commands().two_ranks("tests.ranks.families", tmp_path, write_model(family, tmp_path / "model", seed=2))
    for rank in (0, 1):
        for said in torch.load(tmp_path / f"rank_{rank}.pt").values():
            assert said.startswith("RwkvForCausalLM cannot be divided among ranks: ")
