"""What processes record of their time, and what is read back of it."""

import json
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.run import timeline
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import read_timeline, record, span, start_timeline


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
        (1, "trainer", "save", 1),
        (1, "trainer", "start", 0),
        (1, "trainer", "forward_backward", 1),
        (1, "trainer", "inner", 1),
        (2, "orchestrator", "start", 3),
        (2, "orchestrator", "generate", 4),
    ]
    assert (found[0].lane, found[0].end - found[0].begin) == ("checkpoints", pytest.approx(2, abs=1e-4))
    assert found[2].begin <= found[3].begin and found[2].end >= found[3].end
    assert found[-1].version == 3 and found[-1].end - found[-1].begin == pytest.approx(1.5, abs=1e-4)


def test_a_line_is_plain_json(run_dir: RunDir) -> None:
    start_timeline(run_dir.logs(1), "trainer")
    record("save", 1700000000.123456, 1700000001.5, step=7, lane="checkpoints")
    line = (run_dir.logs(1) / "timeline_trainer.jsonl").read_text().splitlines()[1]
    assert json.loads(line) == {
        "process": "trainer", "name": "save", "begin": 1700000000.123456, "end": 1700000001.5, "step": 7,
        "lane": "checkpoints",
    }  # fmt: skip


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
