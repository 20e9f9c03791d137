"""Four ranks divided in several ways train as one rank does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.config.training import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.trainer.mesh import Mesh, join_mesh
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, write_model
from tests.ranks.parallelism import DIVISIONS, MEASURED, measure, train

pytestmark = pytest.mark.ranks

Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = next(family for family in FAMILIES if family.name == "qwen3")
    return write_model(family, tmp_path_factory.mktemp("qwen3"), seed=2)


@pytest.fixture(scope="module")
def by_rank(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Found]]:
    """What each of four ranks computed, by how they were divided and what was trained."""
    directory = tmp_path_factory.mktemp("ranks")
    return shared_commands().two_ranks("tests.ranks.parallelism", directory, model_dir)


@pytest.mark.parametrize(("division", "run"), [(name, run) for name, (_, runs) in DIVISIONS.items() for run in runs])
def test_ranks_train_as_one_does(
    division: str, run: str, model_dir: Path, mesh: Mesh, by_rank: list[dict[tuple[str, str], Found]]
) -> None:
    one = train(model_dir, mesh, run)
    # Muon multiplies matrices in bfloat16.
    loss, weights = (1e-5, 1e-2) if run == "muon" else (1e-6, 1e-5)
    found = by_rank[0][division, run]
    assert found.keys() == one.keys()
    torch.testing.assert_close(found["losses"], one["losses"], rtol=loss, atol=0.0)
    torch.testing.assert_close(found["norms"], one["norms"], rtol=10 * loss, atol=0.0)
    for name in one.keys() - {"losses", "norms"}:
        atol = weights * float(one[name].abs().max())
        torch.testing.assert_close(found[name], one[name], rtol=0.0, atol=atol, msg=name)
    for other in by_rank[1:]:
        assert all(torch.equal(other[division, run][name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("division", ["copies of shards", "copies of slices"])
def test_offloaded_ranks_have_the_bits_of_others(division: str, by_rank: list[dict[tuple[str, str], Found]]) -> None:
    for run in DIVISIONS[division][1]:
        plain, offloaded = (by_rank[0][name, run] for name in (division, f"offloaded {division}"))
        assert all(torch.equal(offloaded[name], tensor) for name, tensor in plain.items())


def test_ranks_that_share_rows_measure_as_one_does(
    model_dir: Path, mesh: Mesh, by_rank: list[dict[tuple[str, str], Found]]
) -> None:
    """Policy steps, shared prompts, pairs, unpacked rows, scores: what ranks of a group say counts once."""
    one = measure(model_dir, mesh)
    for rank in by_rank:
        found = rank[MEASURED, "measured"]
        assert found.keys() == one.keys()
        assert found.pop("statistics") == pytest.approx(one["statistics"], rel=1e-6)
        for name, value in found.items():
            atol = 5e-6 * max(1.0, float(one[name].abs().max()))
            torch.testing.assert_close(value, one[name], rtol=0.0, atol=atol, msg=name)


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    config = ParallelConfig(num_ranks=4, replicas=2)
    with pytest.raises(ConfigError, match=r"parallel\.replicas = 2 does not divide the number of ranks, 3"):
        join_mesh(config, rank=0, world_size=3, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="sequence_parallel = 3 does not divide the number of ranks, 4"):
        ParallelConfig(num_ranks=4, sequence_parallel=3)
    with pytest.raises(ValueError, match="replicas = 3 does not divide the number of ranks, 4"):
        ParallelConfig(num_ranks=4, replicas=3)
