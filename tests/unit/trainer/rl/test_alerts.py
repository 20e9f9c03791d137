"""Alerts: each at the step where it begins, once, and the same after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from holdfast.config.view import AlertsConfig
from holdfast.trainer.rl.metrics import Alerts

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
def test_what_is_no_alarm(runs: list[tuple[int, Mapping[str, float]]]) -> None:
    alerts = Alerts(CONFIG)
    assert not any(alerts.check(metrics) for metrics in steps_of(runs))


def test_a_metric_that_is_missing_or_no_number_is_passed_over() -> None:
    alerts = Alerts(CONFIG, history=[{"step": 1.0}, {"entropy": None, "ref_kld": None}])
    assert alerts.check({"loss": 1.0, "entropy": None}) == []
