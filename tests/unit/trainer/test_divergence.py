"""The warnings of training that diverges or learns nothing: once for each condition, until it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from holdfast.config.view import AlertsConfig
from holdfast.trainer.divergence import DivergenceWatch, finding_of
from holdfast.trainer.rl.metrics import Alerts


def warned(name: str, values: Sequence[float], *, of: str) -> list[int]:
    """Return the places of the values at which a warning with the words `of` is given, the first of them 1."""
    watch = DivergenceWatch()
    told = [(place, text) for place, value in enumerate(values, start=1) for text in watch.check({name: value})]
    assert all(of in text for _, text in told), told
    return [place for place, _ in told]


@pytest.mark.parametrize(
    ("norms", "at"),
    [
        ([1.0, 1000.0], []),
        ([1.0, 1001.0, 5000.0, 2.0, 1e9], [2, 5]),
        ([0.0, 0.0, 1.0, 2000.0], [4]),
        ([1.0, 500.0, 400.0, 2000.0, 1e6], [5]),  # the median moves with what is usual
    ],
)
def test_a_gradient_a_thousand_times_the_usual_one_is_told_until_it_ends(norms: list[float], at: list[int]) -> None:
    assert warned("grad_norm", norms, of="training diverges") == at


def test_a_gradient_of_zero_is_told_at_its_third_step() -> None:
    norms = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert warned("grad_norm", norms, of="nothing is learned any more") == [7, 12]


def test_a_batch_of_which_every_answer_was_cut_is_told_until_one_ends_by_itself() -> None:
    for named in ("orchestrator.sampling.max_tokens", "orchestrator.seq_len", "trainer.rewards.truncated"):
        assert warned("rollout/truncated", [0.9, 1.0, 1.0, 0.99, 1.0], of=named) == [2, 5]


@pytest.mark.parametrize(
    ("losses", "at"),
    [
        ([6.85, 8.15, 33.9, 118.5, 95.8, 120.0], [5]),
        ([2.0, 0.5, 2.1, 2.2, 2.1], [5]),
        ([2.0, 0.5, 1.9, 1.9, 1.9, 1.9], []),  # no worse than it was
        ([2.0, 0.5, 2.4, 2.5, 1.0, 2.4, 2.5, 2.4], []),  # batches differ
        ([0.4, 0.1, 1.0, 1.0, 1.0], []),  # within a nat
        ([25.0, 20.0, 29.0, 29.0, 29.0], []),  # within a half
        ([-1.0, -2.0, -0.5, -0.4, -0.3], [5]),
    ],
)
def test_a_loss_that_stays_above_all_before_is_told_once(losses: list[float], at: list[int]) -> None:
    assert warned("loss", losses, of="the model gets worse") == at


def test_trainer_and_engine_far_apart_are_told_and_the_loss_of_a_policy_is_not() -> None:
    assert warned("mismatch_kl", [0.9, 1.1, 2.0, 0.5, 3.0], of="far from the one that sampled") == [2, 5]
    watch = DivergenceWatch()
    assert not any(watch.check({"loss": loss, "mismatch_kl": 0.1}) for loss in (0.1, 5.0, 5.0, 5.0))


def test_a_warning_in_short_is_what_was_found() -> None:
    watch = DivergenceWatch()
    (said,) = [text for norm in (2.5, 5000.0) for text in watch.check({"grad_norm": norm})]
    assert finding_of(said) == "the gradient norm is 5e+03, and 2.5 was usual"
    (said,) = DivergenceWatch().check({"rollout/truncated": 1.0})
    assert finding_of(said) == "all answers of the batch ended at a token limit, none by itself"


CONFIG = AlertsConfig(window=4)
CALM = {"ref_kld": 0.02, "entropy": 1.0, "mismatch_kl": 1e-3, "groups/zero_variance": 0.2}


def steps_of(runs: Sequence[tuple[int, Mapping[str, float]]]) -> list[dict[str, float | None]]:
    return [{**CALM, **changed} for count, changed in runs for _ in range(count)]


@pytest.mark.parametrize(
    ("runs", "first", "message"),
    [
        ([(6, {}), (3, {"ref_kld": 0.2})], 6, "ref_kld jumped to 0.2 from 0.02"),
        ([(6, {}), (3, {"mismatch_kl": 0.02})], 6, "mismatch_kl grew to 0.02 from 0.001"),
        ([(6, {}), (3, {"entropy": 0.09})], 6, "entropy fell to 0.09 nats from 1"),
        ([(6, {}), (6, {"groups/zero_variance": 1.0})], 9, "100 % of the groups have equal rewards, for 4 steps"),
    ],
)
def test_an_alert_is_told_at_its_step_and_once(
    runs: list[tuple[int, Mapping[str, float]]], first: int, message: str
) -> None:
    steps = steps_of(runs)
    alerts = Alerts(CONFIG)
    told = [alerts.check(metrics) for metrics in steps]
    assert [place for place, found in enumerate(told) if found] == [first]
    (found,) = told[first]
    assert message in found
    for restart in range(1, len(steps)):
        resumed = Alerts(CONFIG, history=steps[:restart])
        assert [resumed.check(metrics) for metrics in steps[restart:]] == told[restart:]


@pytest.mark.parametrize(
    "runs",
    [
        [(20, {})],
        [(2, {}), (6, {"ref_kld": 0.2})],  # too early to compare
        [(6, {"ref_kld": 1e-6}), (3, {"ref_kld": 1e-3})],  # small, however much larger
        [(6, {}), (3, {"ref_kld": 0.09})],
        [(6, {}), (3, {"groups/zero_variance": 1.0}), (1, {}), (3, {"groups/zero_variance": 1.0})],
    ],
)
def test_what_is_no_alert(runs: list[tuple[int, Mapping[str, float]]]) -> None:
    alerts = Alerts(CONFIG)
    assert not any(alerts.check(metrics) for metrics in steps_of(runs))


def test_a_metric_that_is_missing_or_no_number_is_passed_over() -> None:
    alerts = Alerts(CONFIG, history=[{"step": 1.0}, {"entropy": None, "ref_kld": None}])
    assert alerts.check({"loss": 1.0, "entropy": None}) == []
