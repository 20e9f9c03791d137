"""Long curves and timelines: what is left out of them, and what never is."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.view.report.columns import Block, means_of_stretches, read_columns, thin_out
from holdfast.view.report.curves import MAX_BLOCKS, lanes_of
from holdfast.view.report.run_data import read_run
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


def test_means_are_over_stretches_the_last_of_which_is_shorter() -> None:
    x, (mean,), size = means_of_stretches(np.arange(1.0, 8.0), [np.arange(7.0)], limit=3)
    assert size == 3 and x.tolist() == [1, 4, 7] and mean.tolist() == [1, 4, 6]


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "b": 3}\n{"step": null}\n[]\n{"step": 3, "a')
    columns = read_columns(path)
    assert columns.steps.tolist() == [1, 2] and columns.damaged == 2
    assert np.isnan(columns.values["a"][1]) and columns.values["b"][1] == 3
    assert read_columns(tmp_path / "none").steps.size == 0


def test_a_long_timeline_shows_what_took_most_of_each_stretch(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=2000).path)
    lanes = lanes_of(run, key="timeline", alone=True)
    assert lanes is not None and len(lanes.blocks) < MAX_BLOCKS and "spans are too many to draw" in lanes.note
    seconds = dict.fromkeys(("generate", "wait_for_weights"), 0.0)
    for block in lanes.blocks:
        if block.name in seconds:
            seconds[block.name] += block.end - block.begin
    # Of 2 s each step generates for 1.5 s, which is then what took most of nearly every stretch.
    assert 3000 < seconds["generate"] < 4100 and seconds["wait_for_weights"] < 500
    for lane in lanes.names:
        mine: list[Block] = [block for block in lanes.blocks if block.lane == lane and block.text.startswith("mostly")]
        assert all(one.end <= other.begin + 1e-3 for one, other in itertools.pairwise(mine))


def test_a_process_that_starts_again_within_an_attempt_is_marked(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    path = run_dir.logs(1) / "timeline_orchestrator.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:9], lines[0].replace(b'"step":0', b'"step":4'), *lines[9:]]))
    lanes = lanes_of(read_run(run_dir.path), key="timeline", alone=True)
    assert lanes is not None and [mark.text for mark in lanes.marks] == ["orchestrator again"]
