"""Every built-in tracker, by its own library: each step once under one id, whenever a process is killed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from holdfast import TrackedRun
from holdfast.config.view import TrackingConfig
from holdfast.run import atomic
from holdfast.run.journal import TrainedRewards, note_trained
from holdfast.view.backends import TensorBoard, WandB
from holdfast.view.sending import Sending, take_cursor
from tests.builders.evaluations import evaluated
from tests.conftest import BASE
from tests.runs.trackers import BUILT_IN, TrackedDirectory, wait_until
from tests.unit.commands.test_rollouts_cli import publish

pytestmark = [
    pytest.mark.launch,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of the trackers' own libraries, at their import
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One database for all runs, as on a user's machine."""
    yield tmp_path_factory.mktemp("trackers")


def _begin(path: Path, home: Path, tracker: str, steps: int) -> TrackedDirectory:
    run = TrackedDirectory(path / "run", home)
    run.train(*range(1, steps + 1))
    process = run.start(tracker)
    run.wait_for(process, tracker, steps)
    process.kill()
    process.wait()
    return run


@pytest.mark.parametrize("tracker", BUILT_IN)
def test_each_step_is_there_once_after_kills_and_a_step_back(tracker: str, home: Path, tmp_path: Path) -> None:
    run = _begin(tmp_path, home, tracker, 12)
    # Trained behind the checkpoint of step 10 again, with the same result, and on.
    run.go_back(10)
    run.settings(2, "seed = 4\n")
    run.train(11, 12, 13)
    process = run.start(tracker)
    run.wait_for(process, tracker, 13)
    run.go_back(10)  # while the process lives: the launcher has started the trainer again
    run.train(11, 12, 13, 14, 15)
    run.end(process, tracker)
    ((identity, steps),) = run.steps(tracker).items()
    assert steps == [(step, float(step)) for step in range(1, 16)]
    assert tracker == "tensorboard" or run.run_dir.run_id() in identity
    # Everything is there: a further process adds nothing.
    run.end(run.start(tracker), tracker)
    assert run.steps(tracker) == {identity: steps}
    kept = [path for path in (*run.run_dir.path.rglob("*"), *home.rglob("*")) if path.is_file()]
    assert kept
    for path in kept:
        if not path.is_relative_to(run.run_dir.path / "configs"):
            assert b"hidden-word" not in path.read_bytes(), path


@pytest.mark.parametrize("tracker", BUILT_IN)
def test_evaluations_and_alerts_are_there_once_after_kills(tracker: str, home: Path, tmp_path: Path) -> None:
    """Those of `sft`, which are made beside the training, and end when later steps are sent."""
    run = TrackedDirectory(tmp_path / "run", home)
    run.train(*range(1, 7))
    evaluated(run.run_dir, 0)
    evaluated(run.run_dir, 4)
    evaluated(run.run_dir, 90)  # of a way that the run has left, or ahead of what is sent
    (run.run_dir.evaluations / "step_5").mkdir()  # which goes on
    run.tell(1, "ALERT: entropy fell", step=3)
    run.tell(1, "training", step=3)
    process = run.start(tracker)
    wait_until(lambda: len(_cursor(run, tracker).get("evaluated", [])) == 2 or process.poll() is not None)
    process.kill()
    process.wait()
    evaluated(run.run_dir, 6)
    run.train(7, 8)
    run.tell(1, "WARNING: a thing", step=6)
    run.tell(2, "ALERT: entropy fell", step=7)
    run.end(run.start(tracker), tracker)
    process = run.start(tracker)
    run.train(9)
    run.wait_for(process, tracker, 9)
    evaluated(run.run_dir, 8)
    evaluated(run.run_dir, 9)
    run.end(process, tracker)
    ((_, steps),) = run.steps(tracker, "eval/version").items()
    if tracker == "wandb":
        assert steps == [(1, 0.0), (4, 4.0), (6, 6.0), (9, 8.0)], "at most one in a row"
        assert run.summary()["eval/alone/avg@2/step_9"] == 0.5
    else:
        assert steps == [(step, float(step)) for step in (0, 4, 6, 8, 9)]
    ((_, steps),) = run.steps(tracker).items()
    assert steps == [(step, float(step)) for step in range(1, 10)]
    assert _cursor(run, tracker)["alerted"] == {"1": 2, "2": 1}
    if tracker == "trackio":
        assert run.alerts(tracker) == [("alert", "entropy fell"), ("alert", "entropy fell"), ("warning", "a thing")]
    if tracker == "wandb":
        alerts = [(f"alert in run, step {step}", "entropy fell") for step in (3, 7)]
        assert run.alerts(tracker) == [*alerts, ("warning in run, step 6", "a thing")]


def _cursor(run: TrackedDirectory, tracker: str) -> dict[str, Any]:
    path = run.run_dir.tracking / f"{tracker}.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def test_steps_that_were_logged_before_a_kill_and_not_flushed_count_as_sent(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tried = TrackedDirectory(tmp_path / "run", home), list[int]()
    run.train(1, 2)

    def die(*_: object) -> None:
        tried.append(_cursor(run, "tensorboard")["tried"])
        raise SystemExit

    monkeypatch.setattr(TensorBoard, "log", die)
    with pytest.raises(SystemExit):
        Sending(run.run_dir, "tensorboard", TrackingConfig()).send(lambda: True)
    assert tried == [2] and _cursor(run, "tensorboard")["step"] == 0
    (run.run_dir.tracking / "tensorboard.lock").unlink()  # this process holds it
    run.run_dir.note_rewind(0, by_attempt=2)
    cursor = take_cursor(run.run_dir, "tensorboard")
    assert (cursor.history, cursor.step, cursor.tried) == (2, 0, 0), "other values of steps 1 and 2 are another curve"


def test_files_of_another_machine_are_begun_anew(home: Path, tmp_path: Path) -> None:
    """With the note of what was sent from a store of checkpoints, and the lines behind the checkpoint."""
    run = _begin(tmp_path, home, "tensorboard", 6)
    shutil.rmtree(run.run_dir.path / "tensorboard")
    run.run_dir.metrics.unlink()
    run.train(5, 6, 7)
    run.end(run.start("tensorboard"), "tensorboard")
    assert run.steps("tensorboard") == {"history_1": [(5, 5.0), (6, 6.0), (7, 7.0)]}


def test_a_run_wandb_resumes_takes_the_new_attempts_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where W&B has the earlier ones: here the library's own run of this process stands for that of the service."""
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_ERROR_REPORTING", "false")):
        monkeypatch.setenv(name, value)
    for attempt in (1, 2):
        tracker, settings = WandB(), {"optim.lr": 0.1 * attempt}
        given = {"id": "a", "name": "a", "project": "p", "origin": None, "tags": (), "history": "h"}
        tracker.begin(TrackedRun(directory=tmp_path, settings=settings, attempt=attempt, **given), after=0)
    assert dict(tracker._run.config) == {"optim.lr": 0.2, "attempt": 2, "origin": None}
    tracker.close()


def test_values_that_tensorboard_would_have_as_infinity_are_left_out(home: Path, tmp_path: Path) -> None:
    run = TrackedDirectory(tmp_path / "run", home)
    values = [1.5, 1e39, 3.4e38, -1e300, 3.5]
    lines = [json.dumps({"step": step, "loss": loss, "lr": step}) for step, loss in enumerate(values, start=1)]
    run.run_dir.metrics.write_text("\n".join([*lines, ""]))
    run.end(run.start("tensorboard"), "tensorboard")
    assert [step for step, _ in run.steps("tensorboard")["history_1"]] == [1, 3, 5]
    assert [step for step, _ in run.steps("tensorboard", "lr")["history_1"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_runs_that_begin_together_share_a_new_database(tracker: str, tmp_path: Path) -> None:
    runs = [TrackedDirectory(tmp_path / name / "same", tmp_path) for name in ("a", "b", "c")]
    for run in runs:
        run.train(1, 2)
    for run, process in [(run, run.start(tracker)) for run in runs]:
        run.end(process, tracker)
    for run in runs:
        log = (run.run_dir.path / f"{tracker}.log").read_text()
        assert "tried again" not in log and "Traceback" not in log, log
        assert [(1, 1.0), (2, 2.0)] in run.steps(tracker).values()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_tables_of_answers_are_there_once_after_kills(tracker: str, tmp_path: Path) -> None:
    run = TrackedDirectory(tmp_path / "run", tmp_path)
    if tracker == "mlflow":  # its files would go to the working directory
        client = MlflowClient(tracking_uri=run.environment["MLFLOW_TRACKING_URI"])
        client.create_experiment("tested", artifact_location=str(tmp_path / "files"))
    atomic.write_file(run.run_dir.configs(1) / "orchestrator.toml", f'[model]\nname = "{BASE}"\n'.encode())
    for step in (5, 10, 20):
        publish(run.run_dir, step)
    note_trained(run.run_dir, 20, TrainedRewards([0.0, 1.0] * 2, [-1.0, 1.0] * 2))
    run.train(*range(1, 11))
    process = run.start(tracker)
    run.wait_for(process, tracker, 10)
    process.kill()
    process.wait()
    run.train(*range(11, 31))
    run.end(run.start(tracker), tracker)
    run.end(run.start(tracker), tracker)
    assert [step for step, _ in run.tables(tracker)] == [10, 20], "every tenth step whose batch is there"
    _, told = run.tables(tracker)[1]
    assert all(part in told for part in ("right_answer", "exact 1", "token limit", "cba")), told
