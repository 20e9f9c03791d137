"""`metrics.jsonl`, events, the lines of the console, and the timeline of processes."""

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import DataError
from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV, report
from holdfast.run import atomic, timeline
from holdfast.run.metrics import MetricsWriter, read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import read_timeline, record, span, start_timeline
from holdfast.view import console as view_console
from holdfast.view.console import Console
from holdfast.view.follow import Tail
from tests.builders.attempts import tell


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
    tail = Tail(path)
    assert list(tail) == []
    path.write_text('{"a": 1}\n{"a": ')
    assert list(tail) == [{"a": 1}]
    with open(path, "a") as file:
        file.write('2}\n{"a": 3}\n')
    assert list(tail) == [{"a": 2}, {"a": 3}] and list(tail) == []
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
    run_dir = RunDir(tmp_path)
    run_dir.logs(1).mkdir(parents=True)
    say = partial(tell, run_dir, "trainer", time=time.time() - 60)
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
        "computing: 3,000 of 12,000 pairs, left 1:05", "still computing 9,000 of 12,000 pairs, left 1:05 (1:00)",
        "training: step 0", "step 1/2    0.50 s  validation  8.50 s", "ALERT: too late (step 1)", "step 2/2",
        "finished: step 2",
    ]  # fmt: skip


def test_a_damaged_line_is_named_and_a_resume_sets_it_aside(run_dir: RunDir) -> None:
    whole, damaged = b'{"step": 1, "loss": 1.0}\n', b'{"step": 2, "l\xefss": 1.0}\n'
    run_dir.metrics.write_bytes(whole + damaged)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is damaged: .*Remove the line"):
        read_metrics(run_dir.metrics)
    assert [line["step"] for line in Tail(run_dir.metrics)] == [1]
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


@pytest.fixture(autouse=True)
def _own_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_own", None)


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """Have the kernel cut what is written behind `size` bytes of a file, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_spans_of_several_processes_and_attempts_are_read_in_their_order(run_dir: RunDir) -> None:
    before = time.time()
    start_timeline(run_dir.logs(1), "trainer", step=0)
    with span("forward_backward", step=1), pytest.raises(ZeroDivisionError), span("inner", step=1):
        raise ZeroDivisionError
    record("save", before - 5, before - 3, step=1, lane="checkpoints")
    start_timeline(run_dir.logs(2), "orchestrator", step=3)
    record("generate", before + 50, before + 51.5, step=4, version=3)
    found = read_timeline(run_dir)
    assert [(one.attempt, one.process, one.name, one.step) for one in found] == [
        (1, "trainer", "save", 1), (1, "trainer", "start", 0), (1, "trainer", "forward_backward", 1),
        (1, "trainer", "inner", 1), (2, "orchestrator", "start", 3), (2, "orchestrator", "generate", 4),
    ]  # fmt: skip
    assert (found[0].lane, found[0].end - found[0].begin) == ("checkpoints", pytest.approx(2, abs=1e-4))
    assert found[2].begin <= found[3].begin and found[2].end >= found[3].end
    assert found[-1].version == 3 and found[-1].end - found[-1].begin == pytest.approx(1.5, abs=1e-4)


def test_a_line_is_plain_json(run_dir: RunDir) -> None:
    start_timeline(run_dir.logs(1), "trainer")
    record("save", 1700000000.123456, 1700000001.5, step=7, lane="checkpoints")
    line = (run_dir.logs(1) / "timeline_trainer.jsonl").read_text().splitlines()[1]
    about = {"process": "trainer", "name": "save", "begin": 1700000000.123456, "end": 1700000001.5}
    assert json.loads(line) == about | {"step": 7, "lane": "checkpoints"}


def test_what_is_not_started_records_nothing(run_dir: RunDir) -> None:
    with span("generate", step=1):
        pass
    assert read_timeline(run_dir) == [] and not (run_dir.path / "logs").exists()


def test_lines_behind_one_that_was_cut_off_are_whole(run_dir: RunDir) -> None:
    path = run_dir.logs(1) / "timeline_trainer.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"process":"trainer","name":"generate","begin":1.0,"en')  # killed in its write
    (run_dir.logs(1) / "timeline_later.jsonl").write_text('[1]\n{"process": 3}\nnonsense\n\n')  # none of ours
    start_timeline(run_dir.logs(1), "trainer", step=4)
    assert [(one.name, one.step) for one in read_timeline(run_dir)] == [("start", 4)]


@pytest.mark.parametrize(
    ("room", "why"), [(0, "File too large"), (10, "the storage took a part of a line")], ids=["none", "a part"]
)
def test_lines_without_room(room: int, why: str, run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    start_timeline(run_dir.logs(1), "trainer")
    path = run_dir.logs(1) / "timeline_trainer.jsonl"
    with caplog.at_level(logging.WARNING, logger="holdfast"), _files_of_at_most(path.stat().st_size + room):
        record("lost", 1, 2)
        record("lost too", 2, 3)
    record("kept", 3, 4)
    assert [one.name for one in read_timeline(run_dir)] == ["kept", "start"]
    (said,) = caplog.messages
    assert "timeline_trainer.jsonl lacks lines" in said and why in said


def test_threads_that_all_fail_to_write_close_the_file_once(run_dir: RunDir) -> None:
    """A descriptor that is closed twice, or written after it was closed, may be that of another file by then."""
    start_timeline(run_dir.logs(1), "trainer")
    path = run_dir.logs(1) / "timeline_trainer.jsonl"
    before = len([*Path("/proc/self/fd").iterdir()])
    with ExitStack() as after, _files_of_at_most(path.stat().st_size), ThreadPoolExecutor(8) as threads:
        after.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)
        for done in [threads.submit(lambda: [record("lost", 1, 2) for _ in range(500)]) for _ in range(8)]:
            done.result()
    assert len([*Path("/proc/self/fd").iterdir()]) < before
    record("kept", 3, 4)
    assert [one.name for one in read_timeline(run_dir)] == ["kept", "start"]
