"""Metrics as series of Prometheus: the dashboard and the examples of docs/console.md ask for what exists."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from holdfast.inference.weights import ServerMetrics
from holdfast.view.trackers.scrape import PrometheusSeries, environments_of, series_of
from tests.conftest import ROOT
from tests.pages.documentation import blocks
from tests.pages.metrics import documented_names
from tests.pages.series import dashboard, documented_series, expressions_by_row, names_in, names_of_rows

_PAGE = ROOT / "docs" / "console.md"
_VLLM = re.compile(r'"(vllm:\w+)"')
_ADDED = re.compile("_(total|bucket|sum|count)$")


def _known() -> set[str]:
    """Return the series of runs and of our inference servers."""
    names = (name.replace("val/<metric>", "val/loss").replace("<environment>", "sort") for name in documented_names())
    series = {series_of(re.sub("<(age|number|k)>", "1", name), {"sort"}).name for name in names}
    of_servers = {sample.name for family in ServerMetrics().collect() for sample in family.samples}
    return series | documented_series() | of_servers


def _of_vllm() -> set[str]:
    """Return the names in vLLM's source, as they are without what Prometheus adds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    sources = (Path(spec.origin).parent / "v1").rglob("*.py")
    return {name for source in sources for name in _VLLM.findall(source.read_text())}


def test_every_expression_asks_for_something_that_is_there() -> None:
    known, of_vllm, seen = _known(), _of_vllm(), 0
    for row, expressions in expressions_by_row().items():
        for expression in expressions:
            names = names_in(expression)
            seen += len(names)
            assert names, expression
            unknown = {name for name in names if name not in known and _ADDED.sub("", name) not in of_vllm}
            assert not unknown, (row, expression)
    assert seen > 50 and sum(name.startswith("vllm:") for name in names_of_rows("Inference")) > 5


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panels, board["annotations"]]))) - {"__all"}
    assert used == variables == {"datasource", "run"}
    queries = [board["templating"]["list"][1]["query"]["query"], board["annotations"]["list"][0]["expr"]]
    assert all(names_in(query) <= _known() and names_in(query) for query in queries)


def test_the_examples_for_prometheus_are_read_and_ask_for_what_is_there() -> None:
    examples = [yaml.safe_load(block.text) for block in blocks(_PAGE) if block.language == "yaml"]
    discovered, by_address, rules = examples
    (job,) = discovered["scrape_configs"]
    assert job.keys() == {"job_name", "scrape_interval", "file_sd_configs"}
    assert job["file_sd_configs"][0]["files"] == ["outputs/*/prometheus.json"]
    (job,) = by_address["scrape_configs"]
    assert [entry["targets"] for entry in job["static_configs"]] == [["127.0.0.1:9464"], ["127.0.0.1:8000"]]
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) == 4
    for rule in alerts:
        assert names_in(rule["expr"]) <= _known() and (names_in(rule["expr"]) or 'up{job="holdfast"}' in rule["expr"])


def test_the_examples_of_names_are_what_they_say() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)(?:\{([^`]*)\})?` \|$", _PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 9
    for pattern, name, labels in rows:
        given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        stands = {"number": given.get("engine", ""), **given}
        metric = re.sub("<([a-z]+)>", lambda found, stands=stands: stands[found[1]], pattern)
        series = series_of(metric, {"sort"})
        assert (series.pattern, series.name, dict(series.labels)) == (pattern, name, given)


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
    assert series_of("memory_gib") == PrometheusSeries("holdfast_memory_bytes", "memory_gib", factor=2.0**30)


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
