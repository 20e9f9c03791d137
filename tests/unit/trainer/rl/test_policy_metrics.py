"""The statistics of a step: against slow sums over tokens, however tokens are dealt to ranks; warnings and alerts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.view import AlertsConfig
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.rl.metrics import Alerts, PolicyStatistics
from holdfast.trainer.session import DivergenceWatch, finding_of
from tests.conftest import ModelFactory
from tests.forking.commands import shared_commands
from tests.ranks.policy_metrics import AGES, LOSSES, TOKENS, compute, loss_input, statistics_of


def k3(log_ratio: float) -> float:
    return math.exp(log_ratio) - 1 - log_ratio


def test_every_metric_is_the_mean_over_the_tokens_of_all_updates_and_there_without_tokens(mesh: Mesh) -> None:
    metrics = statistics_of(mesh)
    tokens = [token for passes in TOKENS for one in passes for token in one]
    expected = {
        "loss": sum(map(sum, LOSSES)) / 2, "entropy": sum(-new / 2 for new, *_ in tokens) / 6,
        "ppo_kl": sum(k3(new - old) for new, old, *_ in tokens) / 6,
        "mismatch_kl": sum(k3(old - sampler) for _, old, sampler, *_ in tokens) / 6,
        "ref_kld": sum(k3(reference - new) for new, _, _, reference, _ in tokens) / 6, "mine": 2 / 6,
        "clip_fraction/low": 2 / 6, "clip_fraction/high": 0.0, "clip_fraction/dual": 0.0, "clip_fraction": 2 / 6,
    }  # fmt: skip
    for age in AGES:
        of_age = [k3(old - sampler) for _, old, sampler, _, own in tokens if own == age]
        expected[f"mismatch_kl/age_{age}"] = sum(of_age) / max(1, len(of_age))
    ratios = sorted(math.exp(old - sampler) for _, old, sampler, *_ in tokens)
    # Nearest rank, 0-based: .5 * 5 rounds to 2 (half to even), .95 * 5 and .99 * 5 to 5.
    expected |= {"mismatch/ratio_p50": ratios[2], "mismatch/ratio_p95": ratios[5], "mismatch/ratio_p99": ratios[5]}
    expected |= {"mismatch/ratio_max": ratios[5], "mismatch/max_log_ratio": 0.5}
    assert metrics == pytest.approx(expected, rel=1e-6)
    statistics = PolicyStatistics([], has_reference=False)
    data, age_N = loss_input([])
    statistics.add(data, {"clip_fraction/low": torch.tensor(0)}, torch.zeros(0), age_N)
    statistics.add_update(0.0)
    metrics = statistics.reduce(mesh)
    assert metrics["loss"] == metrics["entropy"] == metrics["clip_fraction"] == 0.0
    assert "ref_kld" not in metrics and "mismatch/ratio_p50" not in metrics


Seen = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def one_and_two(tiny_model: ModelFactory, sft_data: Path, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What one rank computes, and what each of two does."""
    directory, model_dir = tmp_path_factory.mktemp("ranks"), tiny_model()
    shared_commands().two_ranks("tests.ranks.policy_metrics", directory, model_dir, sft_data)
    return compute(model_dir, mesh), [torch.load(directory / f"rank_{rank}.pt") for rank in (0, 1)]


@pytest.mark.ranks
def test_two_ranks_have_metrics_of_the_same_names(one_and_two: Seen) -> None:
    one, two = one_and_two
    assert two[0]["statistics"] == two[1]["statistics"] and list(two[0]["statistics"]) == list(one["statistics"])
    assert two[0]["statistics"] == pytest.approx(one["statistics"], rel=1e-12)
    for name in ("p50", "p95", "p99", "max"):  # quantiles of quantiles would be others
        assert two[0]["statistics"][f"mismatch/ratio_{name}"] == one["statistics"][f"mismatch/ratio_{name}"]


@pytest.mark.ranks
def test_two_ranks_measure_the_bits_that_one_measures(one_and_two: Seen) -> None:
    one, two = one_and_two
    for rank in two:
        for name in ("measured", "with_float32_head"):
            assert all(torch.equal(a, b) for a, b in zip(rank[name], one[name], strict=True))
    assert sum(int((part != 0).sum()) for part in one["measured"]) == 7 + 0 + 10 + 4 + 1


@pytest.mark.ranks
@pytest.mark.parametrize(("what", "tolerance"), [("taught", (1e-4, 1e-6)), ("stepped", (0, 1e-7))])
def test_two_ranks_learn_and_take_steps_as_one(what: str, tolerance: tuple[float, float], one_and_two: Seen) -> None:
    one, two = one_and_two
    assert float(one["taught"]["loss"]) > 0.1
    for rank in two:
        assert rank[what].keys() == one[what].keys()
        for name, tensor in one[what].items():
            torch.testing.assert_close(rank[what][name], tensor, rtol=tolerance[0], atol=tolerance[1], msg=name)


DIVERGES, NOTHING, WORSE = "training diverges", "nothing is learned any more", "the model gets worse"


@pytest.mark.parametrize(("name", "of", "values", "at"), [
    ("grad_norm", DIVERGES, [1.0, 1000.0], []),
    ("grad_norm", DIVERGES, [1.0, 1001.0, 5000.0, 2.0, 1e9], [2, 5]),
    ("grad_norm", DIVERGES, [0.0, 0.0, 1.0, 2000.0], [4]),
    ("grad_norm", DIVERGES, [1.0, 500.0, 400.0, 2000.0, 1e6], [5]),  # the median moves with what is usual
    ("grad_norm", NOTHING, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [7, 12]),
    *(
        ("rollout/truncated", named, [0.9, 1.0, 1.0, 0.99, 1.0], [2, 5])
        for named in ("orchestrator.sampling.max_tokens", "orchestrator.seq_len", "trainer.rewards.truncated")
    ),
    ("mismatch_kl", "far from the policy that sampled", [0.9, 1.1, 2.0, 0.5, 3.0], [2, 5]),
    ("loss", WORSE, [6.85, 8.15, 33.9, 118.5, 95.8, 120.0], [5]),
    ("loss", WORSE, [2.0, 0.5, 2.1, 2.2, 2.1], [5]),
    ("loss", WORSE, [2.0, 0.5, 1.9, 1.9, 1.9, 1.9], []),  # no worse than it was
    ("loss", WORSE, [2.0, 0.5, 2.4, 2.5, 1.0, 2.4, 2.5, 2.4], []),  # batches differ
    ("loss", WORSE, [0.4, 0.1, 1.0, 1.0, 1.0], []),  # within a nat
    ("loss", WORSE, [25.0, 20.0, 29.0, 29.0, 29.0], []),  # within a half
    ("loss", WORSE, [-1.0, -2.0, -0.5, -0.4, -0.3], [5]),
])  # fmt: skip
def test_a_condition_is_told_once_until_it_has_ended(name: str, of: str, values: list[float], at: list[int]) -> None:
    watch = DivergenceWatch()
    told = [(place, text) for place, value in enumerate(values, start=1) for text in watch.check({name: value})]
    assert all(of in text for _, text in told), told
    assert [place for place, _ in told] == at


def test_a_warning_in_short_is_what_was_found_and_the_loss_of_a_policy_is_no_sign() -> None:
    watch = DivergenceWatch()
    (said,) = [text for norm in (2.5, 5000.0) for text in watch.check({"grad_norm": norm})]
    assert finding_of(said) == "the gradient norm is 5e+03, and 2.5 was usual"
    (said,) = DivergenceWatch().check({"rollout/truncated": 1.0})
    assert finding_of(said) == "all answers of the batch ended at a token limit, none by itself"
    watch = DivergenceWatch()
    assert not any(watch.check({"loss": loss, "mismatch_kl": 0.1}) for loss in (0.1, 5.0, 5.0, 5.0))


CONFIG = AlertsConfig(window=4)
CALM = {"ref_kld": 0.02, "entropy": 1.0, "mismatch_kl": 1e-3, "groups/zero_variance": 0.2}


@pytest.mark.parametrize(("runs", "first", "message"), [
    ([(6, {}), (3, {"ref_kld": 0.2})], 6, "ref_kld jumped to 0.2 from 0.02"),
    ([(6, {}), (3, {"mismatch_kl": 0.02})], 6, "mismatch_kl grew to 0.02 from 0.001"),
    ([(6, {}), (3, {"entropy": 0.09})], 6, "entropy fell to 0.09 nats from 1"),
    ([(6, {}), (6, {"groups/zero_variance": 1.0})], 9, "100 % of the groups have equal rewards, for 4 steps"),
    ([(2, {}), (6, {"ref_kld": 0.2})], None, ""),  # too early to compare
    ([(6, {"ref_kld": 1e-6}), (3, {"ref_kld": 1e-3})], None, ""),  # small, however much larger
    ([(6, {}), (3, {"ref_kld": 0.09})], None, ""),
    ([(6, {}), *[(3, {"groups/zero_variance": 1.0}), (1, {})] * 2], None, ""),
])  # fmt: skip
def test_an_alert_is_told_at_its_step(runs: list[tuple[int, Any]], first: int | None, message: str) -> None:
    steps = [{**CALM, **changed} for count, changed in runs for _ in range(count)]
    alerts = Alerts(CONFIG)
    told = [alerts.check(metrics) for metrics in steps]
    assert [place for place, found in enumerate(told) if found] == ([] if first is None else [first])
    assert all(message in text for found in told for text in found) and max(map(len, told)) <= 1
    for restart in range(1, len(steps)):
        resumed = Alerts(CONFIG, history=steps[:restart])
        assert [resumed.check(metrics) for metrics in steps[restart:]] == told[restart:]
    passed_over = Alerts(CONFIG, history=[{"step": 1.0}, {"entropy": None, "ref_kld": None}])
    assert passed_over.check({"loss": 1.0, "entropy": None}) == []
