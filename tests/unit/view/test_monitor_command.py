"""`monitor` without a terminal: snapshots, documents, refusals; and what is said at the end of a run."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from holdfast.config import SftConfig
from holdfast.config.base import CkptConfig
from holdfast.errors import RunDirError
from holdfast.launcher.restart_policy import exit_report
from holdfast.launcher.resume.attempt import Attempt
from holdfast.run import lock
from holdfast.run.run_dir import RunDir
from holdfast.view.follow import ObservedRun
from tests.builders.attempts import tell, write_settings
from tests.builders.broken_storage import unreadable
from tests.builders.checkpoint_files import write_checkpoint
from tests.runs.processes import HANG_S, catches, wait_until
from tests.unit.conftest import Command, Refused


@pytest.fixture
def steps(run_dir: RunDir) -> RunDir:
    """A run of three steps that nobody is at work on."""
    run_dir.metrics.write_text("".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in (1, 2, 3)))
    for name, text in (("inference", "max_steps = 99"), ("broken", "max_steps = ["), ("sft", "max_steps = 4")):
        write_settings(run_dir, name, text)
    return run_dir


end = partial(tell, process="launcher", phase="ended")


def document(run_command: Command, run_dir: RunDir) -> dict[str, object]:
    code, out, _ = run_command("monitor", run_dir.path, "--json")
    assert code == 0 and out.count("\n") == 1
    return json.loads(out)


def test_a_snapshot_says_what_is_known_and_writes_nothing(run_command: Command, steps: RunDir) -> None:
    write_checkpoint(steps, 2)
    before = {path: path.stat().st_mtime_ns for path in (steps.path, *steps.path.rglob("*"))}
    code, out, _ = run_command("monitor", steps.path, "--once")
    assert code == 0 and "stopped" in out and "step 3/4" in out and "step 2 committed" in out and "\x1b" not in out
    told = document(run_command, steps)
    assert before == {path: path.stat().st_mtime_ns for path in (steps.path, *steps.path.rglob("*"))}
    assert (told["status"], told["step"], told["max_steps"], told["holder"]) == ("stopped", 3, 4, None)
    assert told["checkpoint"]["good"] == 2 and told["metrics"] == {"step": 3, "loss": 3.5}  # pyright: ignore


@pytest.mark.parametrize(("code", "status"), [(0, "finished"), (143, "stopped"), (4, "stopped"), (3, "failed")])
def test_the_last_word_of_the_launcher_counts(run_command: Command, steps: RunDir, code: int, status: str) -> None:
    end(steps, exit_code=code)
    assert document(run_command, steps)["status"] == status


def test_a_failed_run_says_by_what(run_command: Command, steps: RunDir) -> None:
    for error, said in (
        ("trainer: step 2: loss is nan\n       log: trainer.log", ["error: trainer: step 2: loss is nan"]),
        (None, []),
    ):
        events = end(steps, exit_code=3, error=error)
        code, out, err = run_command("monitor", steps.path, "--once")
        assert code == 0 and out[out.index("checkpoint") :].splitlines()[1:] == said, err
        events.unlink()
    end(steps, exit_code=143, error="stopped")
    assert "error" not in run_command("monitor", steps.path, "--once")[1]


def test_a_holder_elsewhere_counts_while_files_change(run_command: Command, steps: RunDir) -> None:
    (steps.path / "run.lock").write_text("1 another another/pid:[1]\n")
    told = document(run_command, steps)
    assert told["status"] == "running" and told["holder"] == "process 1 on another"
    events, logs = tell(steps, "trainer", "loading checkpoint", time=1.0), steps.logs(1)
    (trainer := logs / "trainer.log").touch()
    for path in (steps.metrics, steps.path / "run.lock", events, logs.parent, logs):
        os.utime(path, (1e9, 1e9))
    assert document(run_command, steps)["status"] == "running", "the log of a process grows"
    os.utime(trainer, (1e9, 1e9))
    assert document(run_command, steps)["status"] == "silent"
    code, out, _ = run_command("monitor", steps.path, "--once")
    assert code == 0 and "silent (no heartbeat for " in out, "nobody here can tell whether it lives"
    end(steps, exit_code=3)
    assert document(run_command, steps)["status"] == "failed", "its last word counts, though its name stays in the lock"


def test_what_is_known_stays_while_the_storage_is_away(run_dir: RunDir) -> None:
    observed = ObservedRun(run_dir, "run")
    identity = run_dir.path / "run.json"
    with unreadable(identity):
        observed.look()
    assert observed.status == "unreadable" and observed.since == "(Input/output error)"
    run_dir.metrics.write_text('{"step": 1}\n')
    observed.look()
    assert (observed.status, observed.state.step) == ("stopped", 1)
    with unreadable(identity):
        observed.look()
    assert (observed.status, observed.state.step) == ("stopped", 1)
    identity.unlink()
    observed.look()
    assert observed.status == "waiting", "--clean has removed it"


def test_a_holder_is_known_without_touching_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    assert lock.living_holder(path) is None
    path.write_text("")
    assert lock.living_holder(path) is None and lock.take(path) is None
    assert lock.living_holder(path) == lock.Holder.me()
    os.utime(path, (1e9, 1e9))
    assert lock.living_holder(path) is None, "written before this process began: another had its number"


def test_an_evaluation_is_shown_as_well(run_command: Command, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    for name in ("config", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "evaluate.toml").touch()
    assert run_command("monitor", tmp_path, "--once")[1].splitlines()[1:] == ["evaluation starting"]
    event = {"time": 1.0, "process": "evaluation", "phase": "evaluating", "tasks": 4}
    (tmp_path / "logs" / "events.jsonl").write_text(json.dumps(event) + "\n")
    told = document(run_command, run_dir)
    assert told["phases"] == {"evaluation": "evaluating"} and told["status"] == "stopped"
    assert run_command("monitor", tmp_path, "--once")[1].splitlines()[1:] == ["evaluation evaluating, tasks 4"]
    (tmp_path / "summary.json").touch()
    assert document(run_command, run_dir)["status"] == "finished"


def test_without_a_last_word_weights_say_the_end(run_command: Command, steps: RunDir, tmp_path: Path) -> None:
    code, out, _ = run_command("monitor", steps.path, steps.path, "--json")
    assert code == 0 and [one["step"] for one in json.loads(out)] == [3, 3]
    code, out, _ = run_command("monitor", steps.path, steps.path)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["run", steps.path.name, steps.path.name]
    # Without a last word the weights of the last step say it.
    with open(steps.metrics, "a") as file:
        file.write('{"step": 4}\n')
    steps.weights_of(4).mkdir(parents=True)
    assert document(run_command, steps)["status"] == "finished"


@pytest.mark.parametrize(("words", "said"), [
    ([], "there is no run below outputs"),
    (["nowhere"], "there is no directory nowhere (from "),
    (["file"], "file holds no run: it has no run.json"),
    (["a_run", "--interval", "0"], "--interval 0 is not allowed: give 0.05 to 3600 seconds"),
    (["a_run", "--onc"], "unknown flag '--onc'. Did you mean '--once'?"),
])  # fmt: skip
def test_mistakes_are_one_message(words: list[str], said: str, refused: Refused, in_tmp_path: Path) -> None:
    (in_tmp_path / "file").touch()
    (in_tmp_path / "a_run").mkdir()
    RunDir(in_tmp_path / "a_run").create()
    assert said in refused("monitor", *words)


def test_a_run_directory_that_is_a_file_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in ((tmp_path / "file", "it is a file"), (tmp_path / "file" / "below", "it lies below a file")):
        with pytest.raises(RunDirError, match=f"cannot be a run directory: {said}. Choose another"):
            RunDir(path).lock()


def test_the_end_of_a_run_says_how_it_goes_on(run_dir: RunDir) -> None:
    config = SftConfig.model_validate({"max_steps": 20, "ckpt": {"interval": 10}})

    def lines(step: int, exit_code: int) -> list[str]:
        return exit_report(Attempt(run_dir, 1, None), config, step=step, exit_code=exit_code)[0]

    assert lines(0, 2) == [], "a mistake in what was given is one message"
    assert lines(5, 143) == [] and lines(5, 4) == ["no checkpoint was saved: train from the first step again"]
    for config.ckpt in (CkptConfig(), None):
        assert len(lines(5, 0)) == 1 and "--ckpt.interval" in lines(5, 0)[0]
    assert lines(5, 3)[0] == "ended at step 5 of 20, by an error"
    write_checkpoint(run_dir, 5)
    (line,) = lines(5, 143)
    path = run_dir.checkpoint(5)
    assert line == f"last checkpoint: step 5 in {path}; to continue, give the same command again"
    assert lines(5, 2)[-1].endswith("; to continue, mend that and give the command again"), "it would be refused again"
    write_checkpoint(run_dir, 20)
    assert lines(20, 0)[0].endswith("--ckpt.resume-step latest and a larger --max-steps")
    with unreadable(manifest := path / "manifest.json"):
        assert lines(20, 0)[0].startswith(f"cannot list the checkpoints: {manifest} cannot be read")


def test_a_signal_ends_a_long_wait(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "holdfast", "monitor", str(tmp_path / "coming"), "--wait", "--once"]
    with subprocess.Popen([*words, "--interval", "3600"], stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: catches(process.pid, signal.SIGHUP), "its handlers")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert process.returncode == 0 and "waiting" in out
