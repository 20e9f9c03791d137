"""Two ranks read data and weights, and compute with every family, as one does."""

import json
from pathlib import Path

import pytest
import torch

from holdfast.config.training import SftDataConfig, TrainedModelConfig
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import initial_weights, load_model_config
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, random_samples, reference_outcome, write_model
from tests.ranks.families import LENGTHS, compute

pytestmark = pytest.mark.ranks


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of the family that is asked for."""
    family = next(family for family in FAMILIES if family.name == request.param)
    return write_model(family, tmp_path / "model", seed=2)


@pytest.mark.parametrize(
    ("model", "is_sliced"),
    [("falcon_h1", False), ("falcon", False), ("qwen3_next", False), ("qwen3_moe", True), ("gpt_oss", True)],
    indirect=["model"],
)
def test_two_ranks_compute_what_plain_transformers_does(
    model: Path, is_sliced: bool, mesh: Mesh, tmp_path: Path
) -> None:
    """Divided in every way, or refused. Falcon-H1 has recurrent layers and scales its logits, and Falcon chooses its
    attention when it is built; then there are linear attention, experts, and sinks.
    """
    one = compute(model, mesh)
    plain = reference_outcome(model, random_samples(LENGTHS, seed=1))
    assert float(one["loss"]) == pytest.approx(plain.loss, abs=1e-5)
    for found in shared_commands().two_ranks("tests.ranks.families", tmp_path, model):
        if not is_sliced:
            assert "cannot be computed in slices of its rows" in found.pop("slices")
        for division, two in found.items():
            assert two.keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5, msg=f"{division} {key}")
        assert all(torch.equal(found["offloaded"][key], value) for key, value in found["shards"].items())


@pytest.mark.parametrize("model", ["rwkv"], indirect=True)
def test_a_family_that_cannot_be_divided_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    for found in shared_commands().two_ranks("tests.ranks.families", tmp_path, model):
        for said in found.values():
            assert said.startswith("RwkvForCausalLM cannot be divided among ranks: ")


@pytest.mark.parametrize(("model", "read_whole"), [("qwen3", ()), ("qwen3_moe", ("experts",))], indirect=["model"])
def test_each_rank_reads_its_part(model: Path, read_whole: tuple[str, ...], tmp_path: Path) -> None:
    """Experts are one tensor of a layer in memory and many in files: each rank makes the whole, and keeps its part."""
    config = TrainedModelConfig(name=str(model))
    whole = initial_weights(config, load_model_config(config.name), seed=0)
    ranks = shared_commands().two_ranks("tests.ranks.initial_weights", tmp_path, model)
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


def test_ranks_of_one_machine_and_of_two_read_the_same(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "ab" * (1 + k % 5), "completion": "c" * (1 + k % 7)}) for k in range(1200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "other.jsonl").write_text("\n".join(rows[1:]))
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:900], '{"prompt": "ab"}', *rows[900:]]))
    plain = SftDataConfig(name=str(tmp_path / "rows.jsonl"), cache_dir="")
    expected = fingerprint_samples(load_samples(plain, load_tokenizer("examples/reverse_text/base"), seed=0)[0])
    for found in shared_commands().two_ranks("tests.ranks.cached_samples", tmp_path):
        assert "are not the same on all machines" in found.pop("others")  # what rank 1 made of its own is right there
        assert "bad.jsonl, row 901: " in found.pop("error")
        assert found == dict.fromkeys(
            ("one, first", "one, second", "two, first", "two, second", "kept by none", "kept by one of two"), expected
        )
    assert len(list((tmp_path / "cache_one" / "shared").iterdir())) == 1
    assert [len(list((tmp_path / "cache_two" / str(rank)).iterdir())) for rank in (0, 1)] == [1, 2]
