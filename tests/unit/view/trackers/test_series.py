"""From names in `metrics.jsonl` to series of Prometheus."""

from __future__ import annotations

import re

import pytest

from holdfast.view.trackers.scrape import Series, environments_of, series_of
from tests.pages.metrics import documented_names

_ENVIRONMENTS = frozenset({"sort", "verifiers:a/b"})


@pytest.mark.parametrize(
    ("metric", "name", "labels"),
    [
        ("loss", "holdfast_loss", {}),
        ("reward/mean", "holdfast_reward_mean", {}),
        ("reward/sort/mean", "holdfast_reward_environment_mean", {"environment": "sort"}),
        ("reward/verifiers:a/b/p90", "holdfast_reward_environment_p90", {"environment": "verifiers:a/b"}),
        ("time/step", "holdfast_time_seconds", {"phase": "step"}),
        ("engine/1/failures", "holdfast_engine_failures", {"engine": "1"}),
        ("mismatch_kl", "holdfast_mismatch_kl", {}),
        ("mismatch_kl/age_2", "holdfast_mismatch_kl_age", {"age": "2"}),
        ("groups/drawn", "holdfast_groups_drawn", {}),
        ("groups/dropped/timeout", "holdfast_groups_dropped", {"reason": "timeout"}),
        ("sort/exact", "holdfast_environment_metric", {"environment": "sort", "metric": "exact"}),
        ("sort/pass@4", "holdfast_environment_pass_at_k", {"environment": "sort", "k": "4"}),
        ("sort/tools/calls", "holdfast_environment_tools_calls", {"environment": "sort"}),
        ("sort/tools/failed/raised", "holdfast_environment_tools_failed", {"environment": "sort", "reason": "raised"}),
        ("eval/held-out/avg@8", "holdfast_eval_environment_avg_at_k", {"environment": "held-out", "k": "8"}),
        ("eval/version", "holdfast_eval_version", {}),
        ("curriculum/sort/level", "holdfast_curriculum_environment_level", {"environment": "sort"}),
        ("my-loss/share", "holdfast_my_loss_share", {}),
    ],
)
def test_a_metric_has_one_series(metric: str, name: str, labels: dict[str, str]) -> None:
    series = series_of(metric, _ENVIRONMENTS)
    assert (series.name, dict(series.labels), series.factor) == (name, labels, 1.0)


def test_units_are_base_units() -> None:
    assert series_of("memory_gib") == Series("holdfast_memory_bytes", "memory_gib", factor=2.0**30)


def test_environments_are_known_by_their_quantiles() -> None:
    step = ["reward/p10", "reward/mean", "reward/sort/p10", "reward/sort/mean", "reward/verifiers:a/b/p10", "sort/p10"]
    assert environments_of(step) == _ENVIRONMENTS


def test_all_that_is_documented_has_a_name_of_its_own() -> None:
    series: dict[str, str] = {}
    for documented in documented_names():
        metric = re.sub("<(age|k|number)>", "4", documented.replace("<environment>", "sort"))
        metric = re.sub("<[a-z]+>", "other", metric)
        found = series_of(metric, _ENVIRONMENTS)
        assert re.fullmatch("holdfast_[a-zA-Z0-9_]+", found.name), documented
        assert series.setdefault(found.name, found.pattern) == found.pattern, (documented, found)
    assert len(series) > 90
