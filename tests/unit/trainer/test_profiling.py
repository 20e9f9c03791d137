"""The phases of steps in the timeline, and profiles: which steps are recorded, and what cannot be written."""

import logging
import resource
from collections.abc import Callable

import pytest
import torch

from holdfast.config.view import ProfiledSteps
from holdfast.run import timeline
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import read_timeline, start_timeline
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.profiling import Profiler
from holdfast.trainer.session import Stopwatch
from tests.runs.profiles import Trace, traces


@pytest.fixture(autouse=True)
def _logs(run_dir: RunDir) -> None:
    run_dir.logs(1).mkdir(parents=True, exist_ok=True)


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
    return sorted(path.name for path in run_dir.logs(1).iterdir())


def test_exactly_the_steps_asked_for_are_recorded(run_dir: RunDir, mesh: Mesh) -> None:
    _train(Profiler(ProfiledSteps(3, 4), run_dir, mesh, done=0), range(1, 7))
    assert _left(run_dir) == ["profile_steps_3_to_4"], "it is there before the run has ended"
    (profile,) = run_dir.profiles()
    assert profile == run_dir.logs(1) / "profile_steps_3_to_4" and traces(profile) == ["rank_0.json.gz"]
    trace = Trace.read(profile)
    assert trace.steps() == [3, 4]
    trace.check_phase("forward_backward")


@pytest.mark.parametrize(
    ("asked", "done", "trained", "recorded"),
    [((1, 2), 0, range(1, 3), [1, 2]), ((2, 4), 2, range(3, 6), [3, 4])],
    ids=["to the last step", "a run that goes on within the steps"],
)
def test_the_steps_that_are_left_are_recorded(
    run_dir: RunDir, mesh: Mesh, asked: tuple[int, int], done: int, trained: range, recorded: list[int]
) -> None:
    _train(Profiler(ProfiledSteps(*asked), run_dir, mesh, done=done), trained).end()
    assert _left(run_dir) == [f"profile_steps_{recorded[0]}_to_{recorded[-1]}"]
    assert Trace.read(*run_dir.profiles()).steps() == recorded


@pytest.mark.parametrize("is_agreed", [True, False])
def test_what_was_recorded_before_a_stop_is_written(run_dir: RunDir, mesh: Mesh, is_agreed: bool) -> None:
    profiler = Profiler(ProfiledSteps(2, 9), run_dir, mesh, done=0)
    _train(profiler, range(1, 5)).begin_step(5)
    profiler.stop(4, is_agreed=is_agreed)
    assert _left(run_dir) == ["profile_steps_2_to_4"] and Trace.read(*run_dir.profiles()).steps()[:3] == [2, 3, 4]
    profiler.stop(4, is_agreed=is_agreed)  # it is written already
    assert _left(run_dir) == ["profile_steps_2_to_4"]


@pytest.mark.parametrize(
    ("begun", "is_agreed", "left"),
    [(range(1, 3), False, ["profile_steps_2_to_2"]), (range(1, 2), True, []), (range(1, 3), True, [])],
    ids=["an error in the first step", "before the first step", "where it begins"],
)
def test_what_ends_before_a_whole_step_leaves_what_was_begun(
    run_dir: RunDir, mesh: Mesh, begun: range, is_agreed: bool, left: list[str]
) -> None:
    profiler = Profiler(ProfiledSteps(2, 9), run_dir, mesh, done=0)
    for step in begun:
        profiler.begin_step(step)
    profiler.stop(1, is_agreed=is_agreed)
    assert _left(run_dir) == left


def _no_directory(run_dir: RunDir) -> None:
    run_dir.logs(1).rename(run_dir.path / "moved")
    run_dir.logs(1).write_text("not a directory")


def _taken_name(run_dir: RunDir) -> None:
    (run_dir.logs(1) / "profile_steps_1_to_2" / "rank_0.json.gz").mkdir(parents=True)


@pytest.mark.parametrize("break_it", [_no_directory, _taken_name])
def test_a_profile_that_cannot_be_written_is_warned_of_once_and_the_run_goes_on(
    run_dir: RunDir, mesh: Mesh, break_it: Callable[[RunDir], None], caplog: pytest.LogCaptureFixture
) -> None:
    profiler = Profiler(ProfiledSteps(1, 2), run_dir, mesh, done=0)
    break_it(run_dir)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        _train(profiler, range(1, 5)).end()
    said = [text for text in caplog.messages if "profile" in text]
    assert len(said) == 1 and said[0].startswith("WARNING: the profile is left out, or incomplete: ")
    assert not list(run_dir.path.rglob(".tmp-*"))
    assert not torch.autograd._profiler_enabled(), "it records on, for the rest of the run"


def test_a_disk_that_takes_half_a_trace_has_none(run_dir: RunDir, mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "is that full, or read-only?" in said and _left(run_dir) == []


def test_a_profiler_that_does_not_start_is_warned_of_once_and_not_tried_again(
    run_dir: RunDir, mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def start(_: torch.profiler.profile) -> None:
        tries.append(1)
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")  # as on a GPU whose counters are for root alone

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        _train(Profiler(ProfiledSteps(2, 3), run_dir, mesh, done=0), range(1, 6)).end()
    (said,) = [text for text in caplog.messages if "profile" in text]
    assert said.rpartition(": ")[2] == "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    assert len(tries) == 1 and _left(run_dir) == []


def test_other_ranks_warn_in_the_log(run_dir: RunDir, mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    second = Mesh(rank=1, world_size=2, device=mesh.device, device_mesh=mesh.device_mesh)
    profiler = Profiler(ProfiledSteps(1, 5), run_dir, second, done=0)
    _train(profiler, range(1, 3))
    (run_dir.logs(1) / "profile_steps_1_to_2" / "rank_1.json.gz").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        profiler.stop(2, is_agreed=False)
    (said,) = [record for record in caplog.records if "rank 1: the profile is left out" in record.message]
    assert said.name == "trainer"


def test_many_phases_of_a_step_are_a_bounded_number_of_lines(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (run_dir.logs(1) / "timeline_trainer.jsonl").stat().st_size / 15 < 130
