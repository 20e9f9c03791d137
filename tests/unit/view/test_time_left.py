"""The time left, as the console tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from holdfast.view.console import Console, step_line
from holdfast.view.state import TimeLeft, duration


def test_it_is_the_mean_of_the_last_steps_times_those_that_are_left() -> None:
    left = TimeLeft()
    assert left.after(10, max_steps=100, now=5.0) is None
    assert left.after(11, max_steps=100, now=7.0) == 2.0 * 89
    assert left.after(13, max_steps=100, now=9.0) == pytest.approx((9 - 5) / 3 * 87), "two lines may be read at once"
    for step in range(14, 65):
        left.after(step, max_steps=100, now=9.0 + (step - 13))
    assert left.after(65, max_steps=100, now=61.0) == pytest.approx(35), "only the last fifty count"
    assert left.after(100, max_steps=100, now=99.0) == 0


def test_the_first_step_says_nothing_and_one_that_comes_again_begins_anew() -> None:
    left = TimeLeft()
    assert left.after(1, max_steps=10, now=50.0, step_s=40.0) is None, "it takes longer than those after it"
    assert left.after(2, max_steps=10, now=53.0) == 24.0
    assert left.after(2, max_steps=10, now=100.0, step_s=1.0) is None
    assert left.after(3, max_steps=10, now=100.0, step_s=2.0) == 14.0, "both were read at once"


def test_durations_and_the_line_of_a_step() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 725, 11240)] == ["0:00", "1:00", "12:05", "3:07:20"]
    line = step_line({"step": 3, "loss": 0.5, "time/step": 2.0}, 10, left_s=14.0)
    assert line.startswith("step  3/10") and line.endswith("left 0:14")
    assert "left" not in step_line({"step": 10, "loss": 0.5}, 10, left_s=0.0)


def test_a_plain_console_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with Console(RunDir(tmp_path), attempt=1, first_step=0, max_steps=4) as console:
        metrics.write_text("".join(json.dumps({"step": step, "time/step": 60.0}) + "\n" for step in (1, 2)))
        console.refresh()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("60.00 s") and "60.00 s  left 0:0" in second
