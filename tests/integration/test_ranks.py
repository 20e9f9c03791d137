"""Two ranks read data and weights, save, and compute with every family, as one does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.config.data import SftDataConfig
from holdfast.run import manifest
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer, save_state
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from tests.forking.commands import shared_commands
from tests.models.families import FAMILIES, random_samples, reference_outcome, write_model
from tests.ranks.checkpoints import make_objects, train, whole
from tests.ranks.families import LENGTHS, compute

pytestmark = pytest.mark.ranks


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of the family that is asked for."""
    family = next(family for family in FAMILIES if family.name == request.param)
    return write_model(family, tmp_path / "model", seed=2)


@pytest.mark.parametrize(("model", "refused"), [
    ("falcon_h1", {"slices", "experts"}), ("falcon", {"slices", "experts"}), ("qwen3_next", {"slices"}),
    ("qwen3_moe", set()), ("gpt_oss", set()),
], indirect=["model"])  # fmt: skip
def test_two_ranks_compute_what_transformers_does(model: Path, refused: set[str], mesh: Mesh, tmp_path: Path) -> None:
    """Divided in every way, or refused. Falcon-H1 has recurrent layers and scales its logits, and Falcon chooses its
    attention when it is built; then there are linear attention, experts, and sinks."""
    one = compute(model, mesh)
    plain = reference_outcome(model, random_samples(LENGTHS, seed=1))
    assert float(one["loss"]) == pytest.approx(plain.loss, abs=1e-5)
    for found in shared_commands().two_ranks("tests.ranks.families", tmp_path, model):
        for name in refused:
            assert {"slices": "in slices of its rows", "experts": "cannot send tokens"}[name] in found.pop(name)
        for division, two in found.items():
            assert two.keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5, msg=f"{division} {key}")
        assert all(torch.equal(found["offloaded"][key], value) for key, value in found["shards"].items())


@pytest.mark.parametrize("model", ["rwkv"], indirect=True)
def test_a_family_that_cannot_be_divided_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    for found in shared_commands().two_ranks("tests.ranks.families", tmp_path, model):
        assert "transformers cannot send tokens of RwkvForCausalLM" in found.pop("experts")
        for said in found.values():
            assert said.startswith("RwkvForCausalLM cannot be divided among ranks: ")


@pytest.mark.parametrize(("model", "read_whole"), [("qwen3", ()), ("qwen3_moe", ("experts",))], indirect=["model"])
def test_each_rank_reads_its_part(model: Path, read_whole: tuple[str, ...], tmp_path: Path) -> None:
    """Experts are one tensor of a layer in memory and many in files: each rank makes the whole, and keeps its part."""
    whole = trained_tensors(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each rank saw in all scenarios; `one` was saved by this process alone."""
    objects = make_objects(0)
    train(objects, 3)
    save_state(directory / "one", objects, step=3)
    return shared_commands().two_ranks("tests.ranks.checkpoints", directory)


@pytest.fixture
def seen(ranks: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank saw in the scenario that the test is named after."""
    scenario = request.node.originalname.removeprefix("test_")
    return [one[scenario] for one in ranks]


def test_saves_behind_training(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["step"] == 2 and rank["progress"] == {"step": 2}
        assert rank["is_equal"] and rank["is_random_equal"] and rank["moved_on"]
        assert 0.45 < rank["staged_share"] < 0.6, "each rank copies its own half"
        assert rank["largest_file_share"] < 0.7, "and writes no more than that"


def test_one_rank_fails(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["told"].startswith("SaveError: the checkpoint of step 1 could not be saved")
        assert "rank 1: Input/output error" in rank["told"] and "__1_0.distcp" in rank["told"]
        assert "rank 0" not in rank["told"]
        assert rank["left"] == [] and rank["then"] == ["step_2"]


def test_one_rank_cannot_copy(seen: list[dict[str, Any]]) -> None:
    assert [one["left"] for one in seen] == [["step_2"], ["step_2"]]


def test_ranks_lose_step(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["told"].startswith("RankLost: the ranks save different steps (5, 6)") and one["left"] == []


def test_changes_its_number(seen: list[dict[str, Any]], directory: Path) -> None:
    """1 to 2 to 1 ranks, and 2 to 1: the state is the same bits."""
    for rank in seen:
        assert rank["step"] == 3 and rank["kinds"] == ["DTensor", "Tensor"] and rank["progress"] == {"step": 5}
    assert manifest.verify(directory / "one").world_size == 1 and manifest.verify(directory / "two").world_size == 2
    loaded = {}
    for name in ("one", "two", "trained"):
        objects = make_objects(9)
        load_state_with_optimizer(directory / name, objects)
        loaded[name] = whole(objects) | {"step": torch.tensor(objects["progress"]["step"])}
    trained = torch.load(directory / "trained.pt", weights_only=True) | {"step": torch.tensor(5)}
    for mine, theirs in ((loaded["two"], loaded["one"]), (loaded["trained"], trained)):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(loaded["one"]["model.0.weight"], loaded["trained"]["model.0.weight"])


def test_damage_is_told_to_all(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["told"].startswith("CheckpointError: ") and "__1_0.distcp is damaged" in rank["told"]
        assert "every checkpoint is damaged" in rank["auto"]


def test_one_rank_is_asked_to_stop(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["asked"] == [False, True] and rank["code"] == 138 and rank["left"] == ["step_1"]
        assert rank["message"] == "stopped by SIGUSR1: step 1 is saved"


def test_all_wait_for_the_upload(seen: list[dict[str, Any]]) -> None:
    ends = ["Stopped: stopped by SIGTERM: step 1 is saved", True, "SaveError: given up after True", False]
    assert [one["ends"] for one in seen] == [ends, ends]


def test_clocks_differ(seen: list[dict[str, Any]]) -> None:
    assert [rank["left"] for rank in seen] == [["step_1"], ["step_1"]]
