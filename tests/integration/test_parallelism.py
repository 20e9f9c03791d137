"""Four ranks divided in several ways train as one rank does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.config.training import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.run import manifest
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer
from holdfast.trainer.mesh import Mesh, join_mesh
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, write_model
from tests.ranks.checkpoints import whole
from tests.ranks.parallelism import DIVISIONS, EXPERTS, MEASURED, RESUMED, build, measure, train

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


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = next(family for family in FAMILIES if family.name == "qwen3_moe")
    return write_model(family, tmp_path_factory.mktemp("qwen3_moe"), seed=2)


@pytest.fixture(scope="module")
def saves(mixture_dir: Path, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the saves of all ranks, with a save of one rank after a step."""
    directory = tmp_path_factory.mktemp("experts")
    train(mixture_dir, mesh, "adamw", between=directory / "one")
    return directory


@pytest.fixture(scope="module")
def experts_by_rank(mixture_dir: Path, saves: Path) -> list[dict[tuple[str, str], Found]]:
    return shared_commands().two_ranks("tests.ranks.parallelism", saves, mixture_dir)


@pytest.mark.parametrize(("division", "run"), [(name, run) for name, (_, runs) in DIVISIONS.items() for run in runs])
def test_ranks_train_as_one_does(
    division: str, run: str, model_dir: Path, mesh: Mesh, by_rank: list[dict[tuple[str, str], Found]]
) -> None:
    same_training(division, run, train(model_dir, mesh, run), by_rank)


@pytest.mark.parametrize(("division", "run"), [(name, run) for name, (_, runs) in EXPERTS.items() for run in runs])
def test_ranks_with_experts_of_their_own_train_as_one_does(
    division: str, run: str, mixture_dir: Path, mesh: Mesh, experts_by_rank: list[dict[tuple[str, str], Found]]
) -> None:
    same_training(division, run, train(mixture_dir, mesh, run), experts_by_rank)


@pytest.mark.parametrize("run", ["adamw", "compact"])
def test_ranks_with_experts_of_their_own_go_on_with_equal_bits(
    run: str, experts_by_rank: list[dict[tuple[str, str], Found]]
) -> None:
    for rank in experts_by_rank:
        straight, resumed = rank[RESUMED, run], rank[RESUMED, f"{run} resumed"]
        assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_a_save_is_loaded_with_experts_divided_in_any_way(
    mixture_dir: Path, mesh: Mesh, saves: Path, experts_by_rank: list[dict[tuple[str, str], Found]]
) -> None:
    """By one rank, by four with one expert, two or all, by copies, and by one rank again."""
    *_, objects = build(mixture_dir, mesh, "adamw")
    load_state_with_optimizer(saves / "one", objects)
    expected = whole(objects)
    assert float(expected["optimizer.model.model.layers.0.mlp.experts.down_proj.exp_avg"].abs().max()) > 0
    for division in EXPERTS:
        *_, objects = build(mixture_dir, mesh, "adamw")
        load_state_with_optimizer(saves / division, objects)
        for found in (whole(objects), *(rank[division, "loaded"] for rank in experts_by_rank)):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    meshes = {division: manifest.verify(saves / division).mesh for division in EXPERTS}
    assert meshes["shards of experts"] == {"fsdp": 4}
    assert meshes["halves of experts"] == {"fsdp": 4, "efsdp": 2, "ep": 2}
    assert meshes["copies of halves"] == {"replicate": 2, "shard": 2, "efsdp": 1, "ep": 2}


def same_training(division: str, run: str, one: Found, by_rank: list[dict[tuple[str, str], Found]]) -> None:
    """Check that all ranks have the numbers of one rank up to rounding."""
    # Muon multiplies matrices in bfloat16, and moments may be rounded to it.
    loss, weights = (1e-5, 1e-2) if run in ("muon", "compact") else (1e-6, 1e-5)
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


def test_ranks_that_share_rows_agree(model_dir: Path, mesh: Mesh, by_rank: list[dict[tuple[str, str], Found]]) -> None:
    """Policy steps, shared prompts, pairs, unpacked rows, scores: what ranks of a group say counts once."""
    one = measure(model_dir, mesh)
    for rank in by_rank:
        found = rank[MEASURED, "measured"]
        assert found.keys() == one.keys() and found.pop("statistics") == pytest.approx(one["statistics"], rel=1e-6)
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
    with pytest.raises(ValueError, match="expert_parallel = 4 does not divide the ranks of a copy of the model, 2"):
        ParallelConfig(num_ranks=4, replicas=2, expert_parallel=4)
    with pytest.raises(ValueError, match="cpu_offload does not go with expert_parallel above 1"):
        ParallelConfig(num_ranks=4, expert_parallel=2, cpu_offload=True)
