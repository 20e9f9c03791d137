"""Long curves and timelines: what is left out of them, and what never is."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.view.charts import MAX_BLOCKS, phase_charts, thin_out, timeline_of
from holdfast.view.run_data import read_columns, read_run
from tests.builders.shown_runs import make_run


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(6, 50))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float], limit: int) -> None:
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    kept_x, kept_y = thin_out(x, y, limit=limit)
    assert len(kept_x) <= max(limit, 2) and (np.diff(kept_x) > 0).all()
    assert (y[kept_x.astype(int)] == kept_y).all()
    assert kept_y.min() == y.min() and kept_y.max() == y.max()
    assert (kept_x[0], kept_x[-1]) == (x[0], x[-1])


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "b": 3}\n{"step": null}\n[]\n{"step": 3, "a')
    columns = read_columns(path)
    assert columns.steps.tolist() == [1, 2] and columns.damaged == 2
    assert np.isnan(columns.values["a"][1]) and columns.values["b"][1] == 3
    assert read_columns(tmp_path / "none").steps.size == 0


def test_a_long_timeline_shows_its_last_spans(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=2000).path)
    chart = timeline_of(run, [run], 0)
    assert chart is not None and f"the last {MAX_BLOCKS:,} of " in chart.note
    assert sum(len(trace["x"]) for trace in chart.figure["data"]) == MAX_BLOCKS


def test_phases_of_a_long_run_are_means_of_steps(tmp_path: Path) -> None:
    (trainer, _) = phase_charts([read_run(make_run(tmp_path / "run", steps=601).path)])
    assert "each bar is the mean of 3 steps" in trainer.note
    (forward,) = (trace for trace in trainer.figure["data"] if trace["name"] == "forward_backward")
    assert forward["x"][:2] == [1, 4] and len(forward["x"]) == 201 and set(forward["y"]) == {1.0}
