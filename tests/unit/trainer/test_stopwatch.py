"""The phases of a trainer's steps, as its timeline has them."""

from __future__ import annotations

import pytest

from holdfast.run import timeline
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import read_timeline, start_timeline
from holdfast.trainer.session import Stopwatch


def test_many_phases_of_one_step_are_a_bounded_number_of_lines(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_own", None)
    start_timeline(run_dir.logs(1), "trainer", step=0)
    stopwatch = Stopwatch()
    for step in (1, 2):
        stopwatch.begin_step(step)
        for _ in range(100):
            with stopwatch.phase("forward"):
                pass
            with stopwatch.phase("optimizer"):
                pass
        stopwatch.take()
        with stopwatch.phase("checkpoint"):
            pass
    found = read_timeline(run_dir)[1:]
    for step in (1, 2):
        mine = [one for one in found if one.step == step]
        for name in ("forward", "optimizer"):
            assert [one.count for one in mine if one.name == name] == [1, 1, 98]
        assert [one.name for one in mine][-1] == "checkpoint" and len(mine) == 7
    assert all(one.begin <= one.end for one in found)
    # 10,000 steps of a trainer with ten phases, three lines each, and of an orchestrator with five: under 20 MB.
    size = (run_dir.logs(1) / "timeline_trainer.jsonl").stat().st_size
    assert size / 15 < 130
