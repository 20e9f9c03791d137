"""The statistics of a step: against slow sums over tokens, and the same however tokens are dealt to ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.trainer.mesh import Mesh
from holdfast.trainer.rl.metrics import PolicyStatistics
from tests.forking.commands import shared_commands
from tests.ranks.policy_metrics import AGES, LOSSES, TOKENS, compute, loss_input, statistics_of


def k3(log_ratio: float) -> float:
    return math.exp(log_ratio) - 1 - log_ratio


def test_every_metric_is_the_mean_over_the_tokens_of_all_updates(mesh: Mesh) -> None:
    metrics = statistics_of(mesh)
    tokens = [token for passes in TOKENS for one in passes for token in one]
    expected = {
        "loss": sum(map(sum, LOSSES)) / 2,
        "entropy": sum(-new / 2 for new, *_ in tokens) / 6,
        "ppo_kl": sum(k3(new - old) for new, old, *_ in tokens) / 6,
        "mismatch_kl": sum(k3(old - sampler) for _, old, sampler, *_ in tokens) / 6,
        "ref_kld": sum(k3(reference - new) for new, _, _, reference, _ in tokens) / 6,
        "mine": 2 / 6,
        "clip_fraction/low": 2 / 6,
        "clip_fraction/high": 0.0,
        "clip_fraction/dual": 0.0,
        "clip_fraction": 2 / 6,
    }
    for age in AGES:
        of_age = [k3(old - sampler) for _, old, sampler, _, own in tokens if own == age]
        expected[f"mismatch_kl/age_{age}"] = sum(of_age) / max(1, len(of_age))
    ratios = sorted(math.exp(old - sampler) for _, old, sampler, *_ in tokens)
    # Nearest rank, 0-based: .5 * 5 rounds to 2 (half to even), .95 * 5 and .99 * 5 to 5.
    expected |= {"mismatch/ratio_p50": ratios[2], "mismatch/ratio_p95": ratios[5], "mismatch/ratio_p99": ratios[5]}
    expected |= {"mismatch/ratio_max": ratios[5], "mismatch/max_log_ratio": 0.5}
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_step_without_trained_tokens_has_metrics_too(mesh: Mesh) -> None:
    statistics = PolicyStatistics([], has_reference=False)
    data, age_N = loss_input([])
    statistics.add(data, {"clip_fraction/low": torch.tensor(0)}, torch.zeros(0), age_N)
    statistics.add_update(0.0)
    metrics = statistics.reduce(mesh)
    assert metrics["loss"] == metrics["entropy"] == metrics["clip_fraction"] == 0.0
    assert "ref_kld" not in metrics and "mismatch/ratio_p50" not in metrics


@pytest.fixture(scope="module")
def one_and_two(
    tiny_model: Callable[..., Path], sft_data: Path, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one rank computes, and what each of two does."""
    directory, model_dir = tmp_path_factory.mktemp("ranks"), tiny_model()
    shared_commands().two_ranks("tests.ranks.policy_metrics", directory, model_dir, sft_data)
    return compute(model_dir, sft_data, mesh), [torch.load(directory / f"rank_{rank}.pt") for rank in (0, 1)]


@pytest.mark.ranks
def test_two_ranks_have_the_metrics_of_one_by_the_same_names(
    one_and_two: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    one, two = one_and_two
    assert two[0]["statistics"] == two[1]["statistics"]
    assert list(two[0]["statistics"]) == list(one["statistics"])
    assert two[0]["statistics"] == pytest.approx(one["statistics"], rel=1e-12)
    for name in ("p50", "p95", "p99", "max"):  # quantiles of quantiles would be others
        assert two[0]["statistics"][f"mismatch/ratio_{name}"] == one["statistics"][f"mismatch/ratio_{name}"]


@pytest.mark.ranks
def test_two_ranks_measure_the_bits_that_one_measures(
    one_and_two: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    one, two = one_and_two
    for rank in two:
        for name in ("measured", "with_float32_head"):
            assert all(torch.equal(a, b) for a, b in zip(rank[name], one[name], strict=True))
    assert sum(int((part != 0).sum()) for part in one["measured"]) == 7 + 0 + 10 + 4 + 1


@pytest.mark.ranks
def test_two_ranks_share_the_tokenising_of_the_samples_beside_the_rollouts(
    one_and_two: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    one, two = one_and_two
    fingerprint, chunks = one["tokenised"]
    assert chunks == [0, 1, 2]
    assert [rank["tokenised"] for rank in two] == [(fingerprint, [0, 2]), (fingerprint, [1])]


@pytest.mark.ranks
def test_two_ranks_learn_from_a_teacher_what_one_learns(
    one_and_two: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    one, two = one_and_two
    assert float(one["taught"]["loss"]) > 0.1
    for rank in two:
        assert rank["taught"].keys() == one["taught"].keys()
        for name, tensor in one["taught"].items():
            torch.testing.assert_close(rank["taught"][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.ranks
def test_muon_takes_the_same_steps_on_two_ranks_as_on_one(
    one_and_two: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    one, two = one_and_two
    for rank in two:
        assert rank["stepped"].keys() == one["stepped"].keys()
        for name, tensor in one["stepped"].items():
            torch.testing.assert_close(rank["stepped"][name], tensor, rtol=0, atol=1e-7, msg=name)
