"""What trackers are told and not told, where sending goes on, and what is refused."""

import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from holdfast.config import SftConfig
from holdfast.config.view import TrackingConfig
from holdfast.errors import ConfigError, RunDirError
from holdfast.launcher.cluster.hosts import THIS_MACHINE
from holdfast.launcher.plan import Plan
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.side_processes import SideProcesses
from holdfast.process.scratch import scratch_name
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import without_secrets
from holdfast.view.follow import Tail
from holdfast.view.load_tracker import check_tracker, load_tracker
from holdfast.view.sending import Evaluations, Sending, TrackerFailed, new_steps, take_cursor
from holdfast.view.track import main as track
from holdfast.view.tracker import TrackedRun
from tests.builders.broken_storage import unreadable
from tests.builders.evaluations import evaluated
from tests.runs.ports import free_port
from tests.runs.prometheus import scrape
from tests.runs.trackers import HANG_S, TrackedDirectory, note_sent, short_directory, wait_until


@pytest.fixture
def run(tmp_path: Path) -> TrackedDirectory:
    return TrackedDirectory(tmp_path / "run", tmp_path)


def test_secrets_are_hidden_by_name_and_form() -> None:
    told = {
        "client.admin_token_env": "HOLDFAST_ADMIN_TOKEN", "max_tokens": 7, "model.tokenizer": "a/b",
        "urls": ["http://me@h:1/x?n=2&X-Signature=a%2B#b"], "a.args.api_key": "sk-1", "b.HF-TOKEN": "x",
        "c.password": "", "nested": {"secret": "s", "plain": 1.5},
    }  # fmt: skip
    assert without_secrets(told) == told | {
        "urls": ["http://***@h:1/x?n=2&X-Signature=***#b"], "a.args.api_key": "***", "b.HF-TOKEN": "***",
        "c.password": "***", "nested": {"secret": "***", "plain": 1.5},
    }  # fmt: skip


def test_lines_come_once_and_whole(run: TrackedDirectory) -> None:
    lines = Tail(run.run_dir.metrics)
    assert new_steps(lines) == []
    run.train(1, 2)
    with open(run.run_dir.metrics, "a") as file:
        file.write('damaged\n[3]\n{"step": 3, "loss"')
    assert [step for step, _ in new_steps(lines)] == [1, 2] and new_steps(lines) == []
    with open(run.run_dir.metrics, "a") as file:
        file.write(': 0.25, "flag": true, "text": "x", "none": null}\n')
    assert new_steps(lines) == [(3, {"loss": 0.25, "flag": True})]
    with open(run.run_dir.metrics, "a") as file:
        file.write('{"step": "2"}\n{"loss": 1}\n')
    assert new_steps(lines) == [], "no steps"
    run.train(2)
    with unreadable(run.run_dir.metrics), pytest.raises(OSError, match="Input/output error"):
        new_steps(lines)  # or a run would count as sent, whose lines nobody has read
    assert [step for step, _ in new_steps(lines)] == [2]


def test_many_lines_come_in_parts(run: TrackedDirectory) -> None:
    run.train(*range(1, 1202))
    lines = Tail(run.run_dir.metrics)
    parts = [[step for step, _ in new_steps(lines)] for _ in range(4)]
    assert [len(part) for part in parts] == [500, 500, 201, 0]
    assert [step for part in parts for step in part] == list(range(1, 1202))


def test_a_cursor_is_of_one_process_and_one_run(run: TrackedDirectory) -> None:
    note_sent(run.run_dir, "wandb", 7)
    assert take_cursor(run.run_dir, "trackio").step == 0  # another tracker is not held up
    with pytest.raises(RunDirError, match="is being sent to wandb already"):
        take_cursor(run.run_dir, "wandb")


def test_what_cannot_be_sent_is_told(run: TrackedDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"uv sync --inexact --extra wandb.*holdfast\[wandb\]"):
        check_tracker("wandb", key="tracking.backends")
    with pytest.raises(ConfigError, match="holds no run"):
        track([str(run.run_dir.path / "configs")])
    with pytest.raises(ConfigError, match="no tracking in its settings"):
        track([str(run.run_dir.path)])
    for flags, said in (
        (("--project", ""), "tracking.project String should have at least 1 character"),
        (("--name", "\udcff"), "tracking.name must be text in UTF-8"),
        (("--to", "wandb", "wandb"), "tracking.backends names 'wandb' twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            track([str(run.run_dir.path), "--to", "tensorboard", *flags])
    settings = run.run_dir.path / "config" / "evaluate.toml"
    settings.parent.mkdir()
    settings.touch()
    with pytest.raises(ConfigError, match="is of `evaluate`: it has no steps to send"):
        track([str(run.run_dir.path), "--to", "tensorboard"])
    assert not run.run_dir.tracking.exists()


def test_a_damaged_cursor_and_a_tracker_that_raises(run: TrackedDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests.runs.own_tracker:OutOfOrder"
    monkeypatch.setenv("TRACKER_FAILS", "raise")
    sending = Sending(run.run_dir, name, TrackingConfig(backends=[name]))
    with pytest.raises(TrackerFailed, match="ConnectionError: the service is away"):
        sending.send(lambda: True)
    (run.run_dir.tracking / "mlflow.json").write_text("{")
    with pytest.raises(RunDirError, match="damaged"):
        take_cursor(run.run_dir, "mlflow")


def test_a_tracker_without_evaluations_and_alerts_is_not_asked_twice(run: TrackedDirectory) -> None:
    name = "tests.runs.own_tracker:InFile"
    run.train(1, 2)
    evaluated(run.run_dir, 2)
    evaluated(run.run_dir, 1)
    (run.run_dir.evaluation(1) / "summary.json").write_text("{}")
    run.tell(1, "ALERT: entropy fell", step=1)
    Sending(run.run_dir, name, TrackingConfig(backends=[name])).send(lambda: True)
    assert (run.run_dir.path / "own.txt").read_text().splitlines()[1:] == ["step 1 1.0", "step 2 2.0"]
    noted = json.loads((run.run_dir.tracking / "tests_runs_own_tracker_InFile.json").read_bytes())
    assert (noted["step"], noted["evaluated"], noted["alerted"]) == (2, [2], {"1": 1})


def test_evaluations_of_rl_come_in_its_lines_alone(run: TrackedDirectory) -> None:
    evaluated(run.run_dir, 2)
    assert [*Evaluations(run.run_dir, 1).ended([])] == [2]
    (run.run_dir.configs(1) / "sft.toml").rename(run.run_dir.configs(1) / "trainer.toml")
    assert Evaluations(run.run_dir, 1).ended([]) == {}


def _beside(run: TrackedDirectory, tracker: str) -> SideProcesses:
    settings = {"output_dir": str(run.run_dir.path), "tracking": {"backends": [tracker]}}
    return SideProcesses(Plan(Attempt(run.run_dir, 1, None), {}, SftConfig.model_validate(settings), []))


@pytest.mark.launch
def test_a_tracker_that_dies_late_is_started_again(run: TrackedDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    run.train(1, 2)
    with _beside(run, "tests.runs.own_tracker:DiesOnce") as beside:
        beside.look(print)
    lines = (run.run_dir.path / "own.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["begin", "step", "step", "begin"]
    assert capfd.readouterr().out == "", "it has everything"


@pytest.mark.launch
def test_a_tracker_that_fails_is_tried_again_after_one_warning(
    run: TrackedDirectory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tests.runs.own_tracker:OutOfOrder"
    monkeypatch.setenv("TRACKER_FAILS", "raise")
    run.train(1, 2)
    with _beside(run, name) as beside:
        beside.look(print)
        (side,) = beside._processes

        def has_failed() -> bool:
            beside.look(print)
            return side.failures == 2

        wait_until(has_failed)
        monkeypatch.setenv("TRACKER_FAILS", "")
    (warning,) = capfd.readouterr().out.splitlines()
    assert warning.startswith(f"WARNING: {name}: {name}: ConnectionError: the service is away. It is tried again. ")
    assert (run.run_dir.path / "own.txt").read_text().splitlines()[1:] == ["step 1 1.0", "step 2 2.0"]


def test_a_signal_ends_the_wait_for_a_tracker(run: TrackedDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    beside, ready, is_over = _beside(run, "wandb"), run.run_dir.path / "ready", threading.Event()
    (side,) = beside._processes
    argv = ["sh", "-c", f"trap '' TERM; touch {ready}; sleep 1000"]
    side.process, beside._waits_s = THIS_MACHINE.start(argv, side.log, {}), HANG_S
    wait_until(ready.exists)

    def ask() -> None:
        while not is_over.wait(0.1):
            os.kill(os.getpid(), signal.SIGUSR1)

    before, begin = signal.signal(signal.SIGUSR1, lambda *_: None), time.monotonic()
    asking = threading.Thread(target=ask)
    asking.start()
    beside.end()
    is_over.set()
    asking.join()
    side.process.wait()
    signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - begin < HANG_S and "wandb: it has not finished in time" in capfd.readouterr().out


def test_a_tracker_that_cannot_start_is_told(run: TrackedDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    name, logs = "tests.runs.own_tracker:DiesOnce", run.run_dir.path / "logs"
    run.train(1, 2)
    with _beside(run, name) as beside:
        beside.look(print)
        wait_until(lambda: run.sent("tests_runs_own_tracker_DiesOnce") == 2)
        logs.rename(logs.with_name("elsewhere"))
        logs.touch()
    assert capfd.readouterr().out.startswith(f"WARNING: {name} cannot be started: ")


@pytest.mark.launch
def test_temporary_files_of_a_track_that_is_killed_go_with_the_next(run: TrackedDirectory) -> None:
    run.train(1, 2)
    argv = [sys.executable, "-m", "holdfast", "track", str(run.run_dir.path), "--to"]
    with short_directory() as temporary:
        environment = {**os.environ, **run.environment, "TMPDIR": str(temporary), "WANDB_SERVICE": "of another process"}
        with open(run.run_dir.path / "run.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as of a run that goes on, and is followed
            process = subprocess.Popen([*argv, "wandb"], env=environment)
            run.wait_for(process, "wandb", 2)
            helpers = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            psutil.wait_procs(helpers, timeout=HANG_S)  # W&B's, which holds the run until it has ended
        (left,) = temporary.iterdir()
        assert left.name.startswith(scratch_name())
        done = subprocess.run([*argv, "tensorboard", "wandb"], env=environment, timeout=HANG_S, check=False)
        assert done.returncode == 0 and list(temporary.iterdir()) == []


def test_a_tracker_without_room_for_temporary_files_goes_on() -> None:
    """In a process of its own, whose directory for temporary files it changes."""
    program = (
        "import tempfile; from holdfast.view.track import use_scratch\n"
        "tempfile.tempdir = '/no/such'\n"
        "use_scratch(); assert tempfile.gettempdir() == '/no/such'\n"
        "tempfile.tempdir = '/' + 'long' * 20\n"
        "use_scratch(); print(tempfile.gettempdir())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"/tmp/{scratch_name()}"), done.stderr
    assert "there is no directory for temporary files: " in done.stderr and not Path(done.stdout.strip()).exists()


def test_a_clock_that_was_set_back_costs_tensorboard_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = TrackedRun(id="r", history=1, name="r", project="p", tags=(), directory=tmp_path, settings={}, attempt=1)
    now = time.time()
    for after, steps, clock in ((0, range(1, 7), now), (4, range(5, 9), now - 3600), (7, range(8, 10), now - 3600)):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        tracker = load_tracker("tensorboard", key="tracking.backends")()
        tracker.begin(about, after=after)
        for step in steps:
            tracker.log(step, {"loss": float(step)})
        tracker.close()
    shown = TrackedDirectory.of(RunDir(tmp_path)).steps("tensorboard")["history_1"]
    assert [step for step, _ in shown] == [*range(1, 10)]


def test_prometheus_shows_the_last_step(run: TrackedDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another address gets an error."""
    port = free_port()
    monkeypatch.setenv("HOLDFAST_PROMETHEUS", f"127.0.0.1:{port}")
    run.train(1, 2)
    evaluated(run.run_dir, 2)
    run.tell(1, "ALERT: entropy fell", step=1)
    config = TrackingConfig(backends=["prometheus"])
    Sending(run.run_dir, "prometheus", config).send(lambda: True)
    (run.run_dir.tracking / "prometheus.lock").unlink()  # as by another process
    run.tell(1, "ALERT: entropy fell", step=2)
    seen = []

    def look(_: float = 0.0) -> None:
        seen.append(scrape(port))

    Sending(run.run_dir, "prometheus", config).send(lambda: bool(seen), look)
    labels = {"run": "run", "run_id": run.run_dir.run_id()}
    assert seen[0].value("holdfast_step", **labels) == 2, "the last step is shown again"
    assert seen[0].value("holdfast_metric", **labels, metric="eval/sort/avg@4") == 0.5
    assert seen[0].value("holdfast_alarms_total", **labels, kind="alert") == 1
    with pytest.raises(OSError):
        scrape(port)
    (run.run_dir.tracking / "prometheus.lock").unlink()
    taken = pytest.raises(TrackerFailed, match=f"cannot listen on 127.0.0.1:{port}: Address already in use")
    with socket.create_server(("127.0.0.1", port)), taken:
        Sending(run.run_dir, "prometheus", config).send(lambda: True)
