"""A scalar model on two ranks is the one on one rank: the same weights, scores, values and gradients."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from holdfast.trainer.mesh import Mesh
from tests.forking.commands import shared_commands
from tests.ranks.scalar_model import compute

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def one_and_two(
    tiny_model: Callable[..., Path], mesh: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one rank computes, and what each of two does."""
    directory, model_dir = tmp_path_factory.mktemp("ranks"), tiny_model("llama", tied=False)
    reward_model = directory / "reward_model"
    shutil.copytree(model_dir, reward_model)
    config = AutoConfig.from_pretrained(model_dir, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(reward_model)
    shared_commands().two_ranks("tests.ranks.scalar_model", directory, model_dir, reward_model)
    return compute(model_dir, reward_model, mesh), [torch.load(directory / f"rank_{rank}.pt") for rank in (0, 1)]


def test_the_weights_and_the_drawn_head_do_not_depend_on_the_ranks(
    one_and_two: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    one, two = one_and_two
    for rank in two:
        assert rank["tensors"].keys() == one["tensors"].keys()
        assert all(torch.equal(rank["tensors"][name], one["tensors"][name]) for name in one["tensors"])


def test_scores_values_and_gradients_are_the_same(one_and_two: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    one, two = one_and_two
    assert all(rank["scores"] for rank in two) and not two[0]["scores"].keys() & two[1]["scores"].keys()
    scores = two[0]["scores"] | two[1]["scores"]
    assert sorted(scores) == [0, 1, 2, 3, 4]
    assert [scores[k] for k in range(5)] == pytest.approx([one["scores"][k] for k in range(5)], rel=1e-5, abs=1e-6)
    for rank in two:
        torch.testing.assert_close(rank["values"], one["values"], rtol=1e-5, atol=1e-6)
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert one["gradients"]["score.weight"].norm() > 0.1


def test_rewards_are_the_same_on_every_rank(one_and_two: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    """Bit for bit, though one of them had nothing to score; as with one rank, whose rows are the same."""
    one, two = one_and_two
    assert two[0]["rewards"] == two[1]["rewards"] == pytest.approx(one["rewards"], rel=1e-5, abs=1e-6)
    assert len(set(one["rewards"])) == 3
