"""The command `report`: what it says of runs of every kind and state, what it leaves out of long ones, and refuses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.run import atomic
from holdfast.run.run_dir import RunDir
from holdfast.view.charts import MAX_BLOCKS, PHASE_COLOURS, phase_charts, thin_out, timeline_of
from holdfast.view.run_data import read_columns, read_run
from tests.builders.attempts import tell, write_settings
from tests.builders.evaluations import evaluated
from tests.builders.shown_runs import BEGIN, make_run
from tests.conftest import BASE
from tests.runs.dashboards import charts_in
from tests.unit.commands.test_rollouts_cli import publish
from tests.unit.conftest import Command, Refused


def figures_of(page: Path) -> dict[str, Any]:
    """Return the charts of a page. The library's own classes refuse a misspelt attribute, or a value of another kind,
    that the page would pass over."""
    figures = charts_in(page.read_text())
    for figure in figures.values():
        go.Figure(**figure)
    return figures


def text_of(page: Path) -> str:
    return re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.S)


def made(run_command: Command, path: Path, *argv: object) -> str:
    """Make the page of a run; return what stands in the run's own page, empty if `argv` sends it elsewhere."""
    code, out, err = run_command("report", path, *argv)
    assert code == 0, err
    assert ".html: " in out
    return "" if argv else text_of(path / "report.html")


def test_a_run_killed_five_times_is_one_curve_with_five_marks(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=24, resumed_from=(4, 8, 12, 16, 20))
    run_dir.weights_of(24).mkdir(parents=True)
    made(run_command, run_dir.path)
    figures = figures_of(run_dir.path / "report.html")
    reward = figures["reward"]
    (curve,) = reward["data"]
    assert curve["name"] == "reward/mean" and curve["x"] == list(range(1, 25)) and None not in curve["y"]
    assert [shape["x0"] for shape in reward["layout"]["shapes"]] == [4, 8, 12, 16, 20]
    assert [label["text"] for label in reward["layout"]["annotations"]] == ["2", "3", "4", "5", "6"]
    assert {"kl", "phases_trainer_0", "phases_orchestrator_0"} <= figures.keys()
    lanes = figures["timeline_0"]
    assert len(lanes["layout"]["shapes"]) == 5 and lanes["layout"]["xaxis"]["type"] == "date"
    names = {"trainer", "trainer: checkpoints", "orchestrator", "inference"}
    assert set(lanes["layout"]["yaxis"]["categoryarray"]) == names
    phases = {"generate", "forward_backward", "save", "wait_for_weights", "start-up"}
    assert phases <= {one["name"] for one in lanes["data"]}
    shown = text_of(run_dir.path / "report.html")
    assert "<td>24 of 24</td>" in shown and "<td>finished</td>" in shown
    assert shown.count("ALERT: entropy fell") == 6


def test_numbers_that_are_none_and_phases_that_are_long_are_told(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    lines[0]["time/step"] = lines[0]["time/wait_for_batch"] = 500.0
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": "x"}\n{"loss": 1}\n{"st')
    shown = made(run_command, run_dir.path)
    assert "some bars are higher than the chart, the highest 500 s" in shown
    assert "2 lines of metrics.jsonl could not be read" in shown
    figures = figures_of(run_dir.path / "report.html")
    assert figures["kl"]["data"][0]["x"] == [1, 2, *range(4, 13)]
    assert figures["lr"]["layout"]["yaxis"]["range"] == [0.0, 2e-4]
    stack = {one["name"]: one["y"] for one in figures["phases_trainer_0"]["data"]}
    assert stack["forward_backward"][1] == 1.0 and stack["wait_for_batch"][1] == 0.5 and stack["other"][1] == 0.5


def test_two_runs_and_what_differs_in_their_settings(run_command: Command, tmp_path: Path) -> None:
    first = make_run(tmp_path / "x" / "run", lr=1e-3, resumed_from=(4,))
    second = make_run(tmp_path / "y" / "run", lr=2e-3, steps=20)
    made(run_command, first.path, second.path, first.path, "--to", tmp_path / "both.html")
    shown, figures = text_of(tmp_path / "both.html"), figures_of(tmp_path / "both.html")
    assert [curve["name"] for curve in figures["reward"]["data"]] == ["x/run", "y/run"]
    assert [len(curve["x"]) for curve in figures["reward"]["data"]] == [12, 20]
    colours = [curve["line"]["color"] for curve in figures["reward"]["data"]]
    assert colours[0] != colours[1]
    assert [shape["line"]["color"] for shape in figures["reward"]["layout"]["shapes"]] == colours[:1]
    row = "<tr><td>optim.lr</td><td>0.001</td><td>0.002</td></tr>"
    assert row in shown and "<td>max_steps</td><td>12</td><td>20</td>" in shown
    assert {"timeline_0", "timeline_1", "phases_trainer_0", "phases_trainer_1"} <= set(figures)
    assert ">attempts</th>" in shown and "<td>12 of 12</td><td>2</td>" in shown, "the first attempt counts"
    assert "<td>20 of 20</td><td>1</td>" in shown
    third = make_run(tmp_path / "z" / "x" / "run")
    for run_dir in (first, third):
        for step in (4, 8):
            evaluated(run_dir, step)
    made(run_command, first.path, third.path, "--to", tmp_path / "both.html")
    figures = figures_of(tmp_path / "both.html")
    assert [curve["name"] for curve in figures["reward"]["data"]] == ["x/run", "z/x/run"]
    found = {one["name"]: one["line"] for one in figures["evaluation_0"]["data"]}
    for one in figures["evaluation_0"]["data"]:
        assert [one["error_y"][end] for end in ("array", "arrayminus")] == [[pytest.approx(0.1)] * 2] * 2
    lines = [found[f"{run}: {name}"] for run in ("x/run", "z/x/run") for name in ("avg@2", "pass@2")]
    assert lines[0]["color"] == lines[1]["color"] != lines[2]["color"] and lines[0]["dash"] != lines[1]["dash"]


def test_rollouts_are_shown_token_by_token(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=5)
    atomic.write_file(run_dir.configs(1) / "orchestrator.toml", f'[model]\nname = "{BASE}"\n'.encode())
    for step in (2, 3, 4):
        publish(run_dir, step)
    (run_dir.batch(3) / "batch.msgpack").write_bytes(b"damaged")
    shown = made(run_command, run_dir.path)
    assert "batch 3 is left out: " in shown and "step 2, a, task 1, sample 1: reward 1" in shown
    assert shown.count('class="rollout better"') == shown.count('class="rollout worse"') == 4
    assert "(+0.5)" in shown and "(-0.5)" in shown
    # The prompt has no log-probability; that of the fifth token, the first that was sampled, is -0.4.
    assert re.search(r'<span>&gt;</span><span class="s p0" title="log-probability -0\.\d{4}">c</span>', shown)
    (run_dir.configs(1) / "orchestrator.toml").unlink()
    assert "texts cannot be shown: there is no tokenizer.json" in made(run_command, run_dir.path)


def test_a_run_that_failed_or_has_no_steps_says_so(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", resumed_from=(2,))

    def end(attempt: int, **fields: object) -> None:
        tell(run_dir, "launcher", "ended", attempt=attempt, time=BEGIN, **fields)

    end(1, exit_code=3, error="of an earlier attempt")
    assert "failed with" not in made(run_command, run_dir.path)
    end(2, exit_code=3, error="trainer: step 2: <loss>\n       log: trainer.log")
    run_dir.metrics.write_text("")
    shown = made(run_command, run_dir.path)
    assert "<td>failed</td>" in shown and "no step is done, so there are no curves" in shown
    assert "<li>attempt 2 failed with exit code 3: trainer: step 2: &lt;loss&gt;</li>" in shown
    (run_dir.logs(2) / "events.jsonl").write_text("")
    end(2, exit_code=143)
    assert "<td>stopped</td>" in made(run_command, run_dir.path)
    run_dir.metrics.write_text("")
    (run_dir.logs(2) / "events.jsonl").write_text("")
    end(2, exit_code=5, error="\n")
    assert "<li>attempt 2 failed with exit code 5</li>" in made(run_command, run_dir.path)


def test_no_two_phases_have_one_colour() -> None:
    assert len(set(PHASE_COLOURS.values())) == len(PHASE_COLOURS)


def test_an_evaluation_alone_is_a_table(run_command: Command, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "judged")
    evaluated(run_dir, 3)
    (run_dir.evaluation(3) / "summary.json").rename(run_dir.path / "summary.json")
    evaluated(run_dir, 4)
    (run_dir.evaluation(4) / "summary.json").write_text("{}")
    made(run_command, run_dir.path, "--to", tmp_path / "page.html")
    shown = text_of(tmp_path / "page.html")
    assert "<td>evaluate</td><td>finished</td>" in shown and "an evaluation is left out" in shown
    assert "<td>avg@2</td><td>0.3</td><td>0.2 to 0.4</td>" in shown and figures_of(tmp_path / "page.html") == {}


def test_a_run_that_has_just_begun_has_a_page(run_command: Command, run_dir: RunDir) -> None:
    run_dir.lock()
    write_settings(run_dir, "trainer", "max_steps = ", attempt=7)
    (run_dir.path / "logs" / "attempt_x").mkdir(parents=True)
    shutil.copy(tell(run_dir, "trainer", "x", attempt=7), run_dir.path / "logs" / "attempt_x")
    shown = made(run_command, run_dir.path)
    assert "<td>running</td><td>0</td>" in shown and "settings are left out" in shown
    assert "attempts before 7 are not shown: their logs were removed" in shown and "<td>7</td>" in shown


def test_secrets_of_settings_are_not_shown(run_command: Command, tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name) for name in "ab")
    for number, run_dir in enumerate((first, second)):
        with open(run_dir.configs(1) / "trainer.toml", "a") as file:
            file.write(f'[ckpt]\ndir = "s3://me:hidden-{number}@store/x"\n[judge]\napi_key = "hidden-{number}"\n')
            file.write('url = "http://host/<b>"\n')
    made(run_command, first.path, second.path)
    page = (first.path / "report.html").read_text()
    assert "hidden-" not in page and "s3://***@store/x" in page and "http://host/&lt;b&gt;" in page


def test_what_cannot_be_done_is_told(refused: Refused, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (tmp_path / "taken.html").mkdir()
    for words, said in (
        ([tmp_path], "holds no run: it has no run.json"),
        ([tmp_path / "nowhere"], "there is no directory"),
        ([run_dir.path, "--to", tmp_path / "page.pdf"], "the name of a page ends with .html"),
        ([run_dir.path, "--to", tmp_path / "nowhere" / "page.html"], "there is no directory"),
        ([run_dir.path, "--to", tmp_path / "taken.html"], "Choose another place with --to"),
    ):
        assert said in refused("report", *words)


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
