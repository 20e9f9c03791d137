"""The warnings of training that diverges or learns nothing: once for each condition, until it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from holdfast.config.view import AlertsConfig
from holdfast.trainer.divergence import DivergenceWatch, finding_of
from holdfast.trainer.rl.metrics import Alerts

DIVERGES, NOTHING, WORSE = "training diverges", "nothing is learned any more", "the model gets worse"


@pytest.mark.parametrize(
    ("name", "of", "values", "at"),
    [
        ("grad_norm", DIVERGES, [1.0, 1000.0], []),
        ("grad_norm", DIVERGES, [1.0, 1001.0, 5000.0, 2.0, 1e9], [2, 5]),
        ("grad_norm", DIVERGES, [0.0, 0.0, 1.0, 2000.0], [4]),
        ("grad_norm", DIVERGES, [1.0, 500.0, 400.0, 2000.0, 1e6], [5]),  # the median moves with what is usual
        ("grad_norm", NOTHING, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [7, 12]),
        *(
            ("rollout/truncated", named, [0.9, 1.0, 1.0, 0.99, 1.0], [2, 5])
            for named in ("orchestrator.sampling.max_tokens", "orchestrator.seq_len", "trainer.rewards.truncated")
        ),
        ("mismatch_kl", "far from the one that sampled", [0.9, 1.1, 2.0, 0.5, 3.0], [2, 5]),
        ("loss", WORSE, [6.85, 8.15, 33.9, 118.5, 95.8, 120.0], [5]),
        ("loss", WORSE, [2.0, 0.5, 2.1, 2.2, 2.1], [5]),
        ("loss", WORSE, [2.0, 0.5, 1.9, 1.9, 1.9, 1.9], []),  # no worse than it was
        ("loss", WORSE, [2.0, 0.5, 2.4, 2.5, 1.0, 2.4, 2.5, 2.4], []),  # batches differ
        ("loss", WORSE, [0.4, 0.1, 1.0, 1.0, 1.0], []),  # within a nat
        ("loss", WORSE, [25.0, 20.0, 29.0, 29.0, 29.0], []),  # within a half
        ("loss", WORSE, [-1.0, -2.0, -0.5, -0.4, -0.3], [5]),
    ],
)
def test_a_condition_is_told_once_until_it_has_ended(name: str, of: str, values: list[float], at: list[int]) -> None:
    watch = DivergenceWatch()
    told = [(place, text) for place, value in enumerate(values, start=1) for text in watch.check({name: value})]
    assert all(of in text for _, text in told), told
    assert [place for place, _ in told] == at


def test_the_loss_of_a_policy_is_no_sign() -> None:
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
