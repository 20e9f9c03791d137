"""The evaluations of a run over its steps: which ones stand together, the table, and the picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.evaluation.estimates import Estimate
from holdfast.orchestrator.evaluation.summary import EnvironmentSummary, Summary
from holdfast.shared.files.run_dir import RunDir

RunCommand = Callable[..., tuple[int, str, str]]


def evaluated(run_dir: RunDir, step: int, *, seed: int = 0, names: tuple[str, ...] = ("avg@2", "pass@2")) -> None:
    """Leave a finished evaluation of `step`, whose values rise with it; one environment dropped all its tasks."""
    estimates = {name: Estimate(step / 10, step / 10 - 0.1, step / 10 + 0.1) for name in names}
    one = EnvironmentSummary(
        num_tasks=5, dropped={}, estimates=estimates, metrics={}, truncated=0.0, sampled_tokens=None
    )
    none = EnvironmentSummary(
        num_tasks=0, dropped={"crash": 5}, estimates={}, metrics={}, truncated=0.0, sampled_tokens=None
    )
    alone = EnvironmentSummary(
        num_tasks=1, dropped={}, estimates={"avg@2": Estimate(0.5, None, None)}, metrics={}, truncated=0.0,
        sampled_tokens=None,
    )  # fmt: skip
    summary = Summary(
        policy={"kind": "weights"},
        tasks={"seed": seed},
        confidence=0.95,
        environments={"a $x": one, "none": none, "alone": alone},
    )
    directory = run_dir.evaluation(step)
    directory.mkdir(parents=True)
    (directory / "summary.json").write_bytes(summary.encode())


def test_the_steps_of_a_run_are_shown_and_drawn(run_command: RunCommand, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    for step in (10, 0, 2):
        evaluated(run_dir, step)
    evaluated(run_dir, 5, seed=1)
    run_dir.evaluation(8).mkdir()  # which is not finished
    picture = tmp_path / "curves.png"
    code, out, err = run_command("evaluate", "--plot", run_dir.path, "--output", picture)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[2] for line in lines if line[:1] == ["a"]] == ["0", "2", "10"]
    assert "0.2 [0.1, 0.3]" in out and "left out, as they were asked otherwise than the last one: steps 5" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run_command("evaluate", "--plot", run_dir.evaluations, "--json")
    document = json.loads(out)
    assert code == 0 and list(document["steps"]) == ["0", "2", "10"] and document["left_out"] == [5]
    assert document["steps"]["2"]["environments"]["a $x"]["estimates"]["avg@2"]["value"] == 0.2


def test_what_cannot_be_drawn_is_told(run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path / "run")
    evaluated(run_dir, 2)

    def refused(*flags: object) -> str:
        code, out, err = run_command("evaluate", "--plot", *flags)
        assert (code, out) == (2, "") and "Traceback" not in err
        return err

    assert "holds no finished evaluations (step_N/summary.json)" in refused(tmp_path)
    assert "a picture ends with .png, .svg, .pdf" in refused(run_dir.path, "--output", tmp_path / "a.txt")
    assert "there is no directory" in refused(run_dir.path, "--output", tmp_path / "nowhere" / "a.png")
    (tmp_path / "taken.svg").mkdir()
    assert "cannot be written: Is a directory" in refused(run_dir.path, "--output", tmp_path / "taken.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "`uv sync --extra plot`" in refused(run_dir.path, "--output", tmp_path / "a.png")
    assert run_command("evaluate", "--plot", run_dir.path)[0] == 0
