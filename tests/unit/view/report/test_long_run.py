"""A report of 10,000 steps and a million rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import make_journal, measure
from tests.builders.shown_runs import make_run
from tests.unit.view.report.test_report import figures_of, text_of


@pytest.mark.clock
def test_a_long_run_takes_seconds_and_a_bounded_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=10_000, metrics=42, resumed_from=(2500, 5000, 7500))
    make_journal(run_dir, 10_000)
    cost = measure(run_dir.path)
    # Of a core, not of the wall clock: that of a busy machine says nothing.
    assert cost.cpu_s < 20 and cost.memory_bytes < 1e9 and cost.page_bytes < 10e6
    page = run_dir.path / "page.html"
    assert len(figures_of(page)["reward"]["data"][0]["x"]) <= 1000
    assert "long curves show the least and the greatest" in text_of(page)
    assert "spans are too many to draw" in text_of(page) and text_of(page).count('class="rollout') == 16
