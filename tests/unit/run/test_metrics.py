"""`metrics.jsonl`, events and the lines of the console."""

import json
import math
import time
from pathlib import Path

import pytest

from holdfast.errors import DataError
from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV, report
from holdfast.run import atomic
from holdfast.run.metrics import MetricsWriter, read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.view import console as view_console
from holdfast.view.console import Console
from holdfast.view.follow import Tail


def test_every_step_is_one_json_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"loss": 0.123456789123, "samples": 2**40, "reward/a b/mean": 1.0})
    writer.write(2, {"loss": float("nan"), "grad_norm": float("inf")})
    writer.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "loss": 0.12345679, "samples": 2**40, "reward/a b/mean": 1.0},
        {"step": 2, "loss": None, "grad_norm": None},
    ]
    assert read_metrics(path) == lines
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
    assert read_metrics(path) == lines, "a torn last line is not read"


def test_a_line_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left on device"):
        writer.write(1, {"loss": 0.5})


def test_a_tail_gives_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path, from_end=False)
    assert list(tail) == []
    path.write_text('{"a": 1}\n{"a": ')
    assert list(tail) == [{"a": 1}]
    with open(path, "a") as file:
        file.write('2}\n{"a": 3}\n')
    assert list(tail) == [{"a": 2}, {"a": 3}]
    assert list(tail) == []
    assert list(Tail(path, from_end=True)) == []
    with open(path, "ab") as file:
        file.write(b'{"a": "\xff"}\n{"a": Infinity}\n{"a": \n[NaN, ' + b"[" * 100_000 + b"\n")
    assert list(tail) == [{"a": math.inf}], "of our own lines none has it, of a user's events one may"


def test_phases_are_reported_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENTS_ENV, str(path))
    monkeypatch.setenv(PROCESS_ENV, "trainer")
    report("loading model", path=Path("somewhere"))
    report("training", step=0)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["process"], first["phase"], first["path"]) == ("trainer", "loading model", "somewhere")
    assert second["phase"] == "training" and second["step"] == 0 and second["time"] >= first["time"]
    monkeypatch.delenv(EVENTS_ENV)
    report("finished")
    assert len(path.read_text().splitlines()) == 2


def test_what_is_said_of_a_step_comes_after_it_and_what_counts_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, now = RunDir(tmp_path), time.time()
    run_dir.logs(1).mkdir(parents=True)

    def say(phase: str, **fields: object) -> None:
        with open(run_dir.logs(1) / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": now - 60, "process": "trainer", "phase": phase, **fields}) + "\n")

    with Console(run_dir, attempt=1, first_step=0, max_steps=2) as console:
        for done in (3, 6, 9):
            say("computing", done=1000 * done, total=12_000, unit="pairs", left_s=65.0)
        console.refresh()
        monkeypatch.setattr(view_console, "_LINE_EVERY_S", 0.0)
        console.refresh()  # nothing is new, and it lasts
        say("training", step=0)
        run_dir.metrics.write_text('{"step": 1, "time/step": 9.0, "time/validation": 8.5}\n{"step": 2}\n')
        say("ALERT: too late", step=1)
        say("finished", step=2)
    lines = [line.split("trainer")[-1].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "computing: 3,000 of 12,000 pairs, left 1:05",
        "still computing 9,000 of 12,000 pairs, left 1:05 (1:00)",
        "training: step 0",
        "step 1/2    0.50 s  val  8.50 s",
        "ALERT: too late (step 1)",
        "step 2/2",
        "finished: step 2",
    ]


def test_a_damaged_line_is_named_and_a_resume_sets_it_aside(run_dir: RunDir) -> None:
    whole, damaged = b'{"step": 1, "loss": 1.0}\n', b'{"step": 2, "l\xefss": 1.0}\n'
    run_dir.metrics.write_bytes(whole + damaged)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is damaged: .*Remove the line"):
        read_metrics(run_dir.metrics)
    assert [line["step"] for line in Tail(run_dir.metrics, from_end=False)] == [1]
    (aside,) = set_aside_after(run_dir, 5, 1)
    assert aside.read_bytes() == damaged and run_dir.metrics.read_bytes() == whole


def test_lines_are_set_aside_before_they_go(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut leaves them nowhere: the shorter file is durable."""
    durably: list[str] = []
    write_file = atomic.write_file

    def noted(path: Path, data: bytes) -> None:
        durably.append(path.name)
        write_file(path, data)

    monkeypatch.setattr(atomic, "write_file", noted)
    run_dir.metrics.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    (aside,) = set_aside_after(run_dir, 1, 1)
    assert durably == [aside.name, run_dir.metrics.name] and aside.read_bytes() == b'{"step": 2}\n'
