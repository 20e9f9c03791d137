"""Two ranks save and load together: overlapped with training, alike in every decision, never whole on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.run import manifest
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer, save_state
from tests.forking.commands import shared_commands
from tests.ranks.checkpoints import make_objects, train, whole

pytestmark = pytest.mark.ranks


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


def test_both_skip(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank == {"answers": [False, True], "left": ["step_1", "step_3"]}


def test_changes_its_number(seen: list[dict[str, Any]], directory: Path) -> None:
    """1 to 2 to 1 ranks, and 2 to 1: the state is the same bits."""
    for rank in seen:
        assert rank["step"] == 3 and rank["kinds"] == ["DTensor", "Tensor"] and rank["progress"] == {"step": 5}
    assert manifest.verify(directory / "one").world_size == 1
    assert manifest.verify(directory / "two").world_size == 2
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
