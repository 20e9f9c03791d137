"""Profiles of steps: what is recorded of which, on which clock, and what becomes of it where something fails."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.config.view import ProfiledSteps
from holdfast.run import timeline
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import Span, record, start_timeline
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.profiling import BASE_S, ProfileFile, Profiler, write_part
from holdfast.trainer.session import Stopwatch
from tests.runs.profiles import Profile, check_clocks


@pytest.fixture(autouse=True)
def _own_timeline(monkeypatch: pytest.MonkeyPatch, run_dir: RunDir) -> None:
    monkeypatch.setattr(timeline, "_own", None)
    start_timeline(run_dir.logs(1), "trainer", step=0)


def _train(profiler: Profiler, steps: range) -> Stopwatch:
    """Do some work in every step, without the last word that the loop is over."""
    stopwatch = Stopwatch(profiler)
    weights = torch.ones(8, 8, requires_grad=True)
    for step in steps:
        stopwatch.begin_step(step)
        with stopwatch.phase("forward_backward"):
            for _ in range(5):
                (torch.ones(4, 8) @ weights).sum().backward()
        stopwatch.take()
    return stopwatch


def _left(run_dir: RunDir) -> list[str]:
    return sorted(path.name for path in run_dir.logs(1).iterdir() if not path.name.startswith("timeline_"))


def test_exactly_the_steps_asked_for_are_recorded_with_both_clocks_one(run_dir: RunDir, mesh: Mesh) -> None:
    profiler = Profiler(ProfiledSteps(3, 4), run_dir, mesh, done=0)
    stopwatch = _train(profiler, range(1, 7))
    assert _left(run_dir) == ["profile_steps_3_to_4.json.gz"], "it is there before the run has ended"
    stopwatch.end()
    profiler.close()
    assert run_dir.profiles() == [run_dir.logs(1) / "profile_steps_3_to_4.json.gz"]
    profile = Profile.read(run_dir.profiles()[0])
    assert profile.marked_steps(0) == ["ProfilerStep#3", "ProfilerStep#4"]
    assert profile.processes() == {"trainer rank 0": 1000, "trainer: timeline": 1}
    assert [one["args"] for one in profile.slices("trainer: timeline")] == [{"step": 3}, {"step": 4}]
    assert list(profile.threads("trainer: timeline")) == ["main work"]
    assert os.getpid() in profile.threads("trainer rank 0").values()
    check_clocks(profile, "forward_backward")
    arrows = [one for one in profile.events if one["ph"] in "sf"]
    assert arrows and {one["pid"] for one in arrows} == {1000}


def test_a_run_that_goes_on_within_the_steps_profiles_the_rest(run_dir: RunDir, mesh: Mesh) -> None:
    _train(Profiler(ProfiledSteps(2, 4), run_dir, mesh, done=2), range(3, 6))
    assert _left(run_dir) == ["profile_steps_3_to_4.json.gz"]
    assert Profile.read(*run_dir.profiles()).marked_steps(0) == ["ProfilerStep#3", "ProfilerStep#4"]


@pytest.mark.parametrize("is_agreed", [True, False])
def test_what_was_recorded_before_a_stop_is_written(run_dir: RunDir, mesh: Mesh, is_agreed: bool) -> None:
    profiler = Profiler(ProfiledSteps(2, 9), run_dir, mesh, done=0)
    _train(profiler, range(1, 5)).begin_step(5)
    profiler.stop(4, is_agreed=is_agreed)
    assert _left(run_dir) == ["profile_steps_2_to_4.json.gz"]
    assert Profile.read(*run_dir.profiles()).marked_steps(0)[:3] == [f"ProfilerStep#{step}" for step in (2, 3, 4)]
    profiler.stop(4, is_agreed=is_agreed)  # it is written already
    assert _left(run_dir) == ["profile_steps_2_to_4.json.gz"]


def test_an_error_in_the_first_step_leaves_what_came_before_it(run_dir: RunDir, mesh: Mesh) -> None:
    profiler = Profiler(ProfiledSteps(2, 9), run_dir, mesh, done=0)
    _train(profiler, range(1, 3))
    profiler.stop(1, is_agreed=False)
    assert _left(run_dir) == ["profile_steps_2_to_2.json.gz"]


@pytest.mark.parametrize("steps", [range(1, 2), range(1, 3)], ids=["before the first one", "where it begins"])
def test_a_stop_before_any_of_the_steps_writes_nothing(run_dir: RunDir, mesh: Mesh, steps: range) -> None:
    profiler = Profiler(ProfiledSteps(2, 9), run_dir, mesh, done=0)
    for step in steps:
        profiler.begin_step(step)
    profiler.stop(1, is_agreed=True)
    assert _left(run_dir) == []


def test_what_ends_behind_the_steps_gets_in_at_the_end_and_what_is_not_of_them_does_not(
    run_dir: RunDir, mesh: Mesh
) -> None:
    profiler = Profiler(ProfiledSteps(1, 2), run_dir, mesh, done=0)
    stopwatch = _train(profiler, range(1, 4))
    (path,) = run_dir.profiles()
    before = Profile.read(path)
    (last,) = before.slices("trainer rank 0", name="ProfilerStep#2")
    middle = BASE_S + last["ts"] / 1e6
    start_timeline(run_dir.logs(1), "orchestrator")
    record("generate", middle, middle + 60, step=3, version=1)
    record("write_batch", middle - 5, middle, step=2, lane="journal")
    record("generate", middle - 90, middle - 60, step=1, version=0)
    stopwatch.end()
    profiler.close()
    after = Profile.read(path)
    assert before.slices("trainer rank 0") == after.slices("trainer rank 0")
    (generated,) = after.slices("orchestrator: timeline", name="generate")
    assert generated["args"] == {"step": 3, "version": 1} and generated["dur"] == pytest.approx(60e6, abs=2)
    assert generated["ts"] == pytest.approx(last["ts"], abs=2)
    assert set(after.threads("orchestrator: timeline")) == {"main work", "journal"}
    assert _left(run_dir) == [path.name]


def _full_logs(run_dir: RunDir) -> None:
    run_dir.logs(1).rename(run_dir.path / "moved")
    run_dir.logs(1).write_text("not a directory")


def _unwritable_name(run_dir: RunDir) -> None:
    (run_dir.logs(1) / "profile_steps_1_to_2.json.gz").mkdir()


@pytest.mark.parametrize("break_it", [_full_logs, _unwritable_name])
def test_a_profile_that_cannot_be_written_is_told_of_once_and_the_run_goes_on(
    run_dir: RunDir, mesh: Mesh, break_it: Callable[[RunDir], None], caplog: pytest.LogCaptureFixture
) -> None:
    profiler = Profiler(ProfiledSteps(1, 2), run_dir, mesh, done=0)
    break_it(run_dir)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        _train(profiler, range(1, 5)).end()
        profiler.close()
    said = [text for text in caplog.messages if "profile" in text]
    assert len(said) == 1 and said[0].startswith("WARNING: the profile is left out, or incomplete: ")
    assert not list(run_dir.path.rglob(".tmp-*"))
    assert not torch.autograd._profiler_enabled(), "it records on, for the rest of the run"


def test_a_disk_that_takes_a_part_of_a_trace_leaves_none(
    run_dir: RunDir, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = Profiler(ProfiledSteps(1, 2), run_dir, mesh, done=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    stopwatch = _train(profiler, range(1, 3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with caplog.at_level(logging.INFO, logger="holdfast"):
            stopwatch.end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (said,) = [text for text in caplog.messages if "profile is left out" in text]
    assert "is that full, or read-only?" in said
    assert _left(run_dir) == []


def test_a_profiler_that_does_not_start_is_told_of_once_and_not_tried_again(
    run_dir: RunDir, mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def start(_: torch.profiler.profile) -> None:
        tries.append(1)
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")  # as on a GPU whose counters are for root alone

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        _train(Profiler(ProfiledSteps(2, 3), run_dir, mesh, done=0), range(1, 6)).end()
    assert [text.rpartition(": ")[2] for text in caplog.messages if "profile" in text] == [
        "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    ]
    assert len(tries) == 1 and _left(run_dir) == []


def test_a_rank_without_a_trace_is_named_and_the_others_are_kept(
    run_dir: RunDir, mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three ranks have theirs: the third died. (This process plays rank 0.)"""
    monkeypatch.setattr("holdfast.trainer.profiling._OTHER_PARTS_S", 0.1)
    three = Mesh(rank=0, world_size=3, device=mesh.device, device_mesh=mesh.device_mesh)
    profiler = Profiler(ProfiledSteps(1, 5), run_dir, three, done=0)
    _train(profiler, range(1, 3))
    other = run_dir.logs(1) / ".tmp-profile_steps_1_to_2.json.gz-rank_2"
    raw = run_dir.path / "raw.json"
    raw.write_text(json.dumps({"traceEvents": [_event(pid=77), _event(pid=0, id=5)], "baseTimeNanoseconds": 0}))
    write_part(raw, other, rank=2, pid=77)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        profiler.stop(2, is_agreed=False)
    assert any("lacks ranks 1;" in text for text in caplog.messages)
    profile = Profile.read(*run_dir.profiles())
    found = profile.processes()
    assert found["trainer rank 2"] == 3000 and found["trainer rank 2: GPU 0"] == 3001 and "trainer rank 0" in found
    assert _left(run_dir) == ["profile_steps_1_to_2.json.gz"]


def _event(**fields: object) -> dict[str, object]:
    return {"ph": "X", "name": "kernel", "cat": "kernel", "tid": 7, "ts": 1.0, "dur": 0.0, **fields}


def test_ranks_of_several_machines_do_not_mix(tmp_path: Path) -> None:
    """Each has its clock's base, devices and arrows from 0, and perhaps the process number of another."""
    parts = []
    for rank in (0, 1):
        raw, part = tmp_path / f"{rank}.json", tmp_path / f"part_{rank}"
        events = [
            _event(pid=50, name="aten::mm", args={"External id": 1}),
            _event(pid=0, name="gemm"),
            {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 9, "pid": 50, "tid": 7, "ts": 1.0},
            {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 9, "pid": 0, "tid": 0, "ts": 1.0, "bp": "e"},
            {"ph": "M", "name": "process_name", "pid": 3, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1, "dur": 2},
        ]
        base = (BASE_S + 10 * rank) * 10**9
        raw.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": base, "traceName": "kept by none"}))
        write_part(raw, part, rank=rank, pid=50)
        parts.append(part)
    file = ProfileFile(tmp_path / "profile.json.gz")
    file.assemble(parts, [])
    profile = Profile.read(file.path)
    assert profile.processes() == {
        "trainer rank 0": 1000, "trainer rank 0: GPU 0": 1001,
        "trainer rank 1": 2000, "trainer rank 1: GPU 0": 2001,
    }  # fmt: skip
    (first,), (second,) = (profile.slices(f"trainer rank {rank}") for rank in (0, 1))
    assert (first["ts"], second["ts"]) == (1.0, 10e6 + 1.0)
    assert first["args"] == {"External id": 1} and first["dur"] == 0.0
    assert [one["id"] for one in profile.events if one["ph"] == "s"] == [9, 9 + 2**32]
    assert not [one for one in profile.events if one.get("pid") == "Spans"]


def test_spans_that_overlap_get_threads_of_their_own(tmp_path: Path) -> None:
    """Of two slices in one thread, Perfetto wants one to enclose the other, or to end before it."""
    spans = [
        Span("trainer", "outer", BASE_S + 1, BASE_S + 5),
        Span("trainer", "inner", BASE_S + 2, BASE_S + 3),
        Span("trainer", "across", BASE_S + 4, BASE_S + 6, count=7),
        Span("trainer", "later", BASE_S + 5, BASE_S + 7),
        Span("of_its_own", "other", BASE_S + 1, BASE_S + 2),
        Span("trainer", "set back", BASE_S + 9, BASE_S + 8, lane="checkpoints"),
    ]
    file = ProfileFile(tmp_path / "profile.json.gz")
    file.assemble([], spans)
    profile = Profile.read(file.path)
    assert list(profile.processes()) == ["trainer: timeline", "of_its_own: timeline"]
    threads = {tid: name for name, tid in profile.threads("trainer: timeline").items()}
    placed = {one["name"]: threads[one["tid"]] for one in profile.slices("trainer: timeline")}
    assert placed == {
        "outer": "main work", "inner": "main work", "across": "main work (2)", "later": "main work",
        "set back": "checkpoints",
    }  # fmt: skip
    for first, second in itertools.combinations(profile.slices("trainer: timeline"), 2):
        if first["tid"] == second["tid"]:
            ends = [one["ts"] + one["dur"] for one in (first, second)]
            assert ends[0] <= second["ts"] or ends[1] <= ends[0]
    (across,) = profile.slices("trainer: timeline", name="across")
    assert across["args"] == {"count": 7}


def test_half_a_trace_is_never_under_the_final_name(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = ProfileFile(folder / "profile.json.gz")
    with pytest.raises(FileNotFoundError):
        file.assemble([folder / "gone"], [])
    assert list(folder.iterdir()) == []
    file.assemble([], [])
    before = file.path.read_bytes()

    def spans() -> list[Span]:
        raise OSError("the timeline cannot be read")

    with pytest.raises(OSError, match="timeline"):
        file.renew_timeline(spans())
    assert file.path.read_bytes() == before and gzip.decompress(before).endswith(b"]}\n")
    assert list(folder.iterdir()) == [file.path]
