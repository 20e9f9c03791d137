"""What is known of a run, from lines of metrics and events in any order that files can give."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.run.run_dir import RunDir
from holdfast.view.console import Console, event_line, step_line
from holdfast.view.follow import Follower, ObservedRun, Stepped, Tail
from holdfast.view.monitor import run_lines
from holdfast.view.state import Alarm, Checkpoints, RunState, duration, find_bottleneck, look_at_checkpoints
from tests.builders.attempts import tell
from tests.builders.broken_storage import unreadable
from tests.builders.checkpoint_files import write_checkpoint


def write_steps(path: Path, *steps: int, **metrics: float | None) -> None:
    """Replace the file at `path`, as a resume does."""
    lines = [json.dumps({"step": step, "loss": 1.0 / step, "time/step": 2.0, **metrics}) + "\n" for step in steps]
    new = path.with_name("new")
    new.write_text("".join(lines))
    new.rename(path)


def test_a_file_is_known_by_what_it_says_and_not_by_its_number(tmp_path: Path) -> None:
    """Where the file system gives it another number, nothing is told twice; where a new file has an old number, all."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3)
    tail = Tail(path)
    assert [line["step"] for line in tail] == [1, 2, 3]
    number = path.stat().st_ino
    write_steps(path, 1, 2, 3, 4)
    assert path.stat().st_ino != number
    assert [line["step"] for line in tail] == [4] and tail.replaced == 0
    path.unlink()
    assert list(tail) == [] and tail.failure is None
    write_steps(path, 1, 2, 3, 4, 5)
    assert [line["step"] for line in tail] == [5] and tail.replaced == 0
    text = path.read_text().replace('"step": 5', '"step": 7') + '{"step": 8}\n'
    number = path.stat().st_ino
    path.write_text(text)
    assert path.stat().st_ino == number
    assert [line["step"] for line in tail] == [1, 2, 3, 4, 7, 8] and tail.replaced == 1


def test_a_step_that_comes_again_replaces_itself_and_what_came_after() -> None:
    state = RunState()
    for step, loss in ((1, 1.0), (2, 0.5), (3, 0.25), (2, 0.75)):
        state.take_step({"step": step, "loss": loss}, unix_s=0.0)
    assert state.metrics["loss"] == 0.75 and [line["step"] for line in state.recent] == [1, 2]


def test_events_of_all_attempts_are_known_and_told_once(run_dir: RunDir) -> None:
    tell(run_dir, "trainer", "waiting for batches", step=0, max_steps=8)
    tell(run_dir, "trainer", "ALERT: entropy fell", step=3)
    tell(run_dir, "launcher", "starting again", restarted="trainer")
    follower = Follower(run_dir)
    follower.catch_up()
    state = follower.state
    assert (state.attempt, state.restarts, state.max_steps, state.first_step) == (1, 1, 8, 0)
    assert state.alarms == [Alarm("alert", "trainer", "entropy fell", 3, 100.0)]
    tell(run_dir, "trainer", "training", attempt=2, time=200.0, step=5, max_steps=9)
    tell(run_dir, "trainer", "WARNING: a thing", attempt=2, time=201.0)
    tell(run_dir, "launcher", "ended", attempt=2, time=202.0, exit_code=0, step=9)
    follower._events._looked = -1e9  # a second later
    told = list(follower.news())
    assert [type(one).__name__ for one in told] == ["Phase", "Alarm"]
    assert (state.attempt, state.max_steps, state.first_step, state.begun_unix_s) == (2, 9, 5, 200.0)
    assert state.ended == {"unix_s": 202.0, "exit_code": 0, "step": 9}
    assert [alarm.kind for alarm in state.alarms] == ["alert", "warning"]
    follower._events._looked = -1e9
    assert list(follower.news()) == []


def test_an_evaluation_that_has_ended_goes_on_no_more() -> None:
    state = RunState()

    def told(phase: str, **details: object) -> list[str]:
        state.take_event({"time": 100.0, "process": "orchestrator", "phase": phase, **details}, attempt=1)
        return [phase.name for phase in state.phases.values()]

    assert told("evaluated", tasks="3/8") == ["evaluated"], "how far it is"
    assert told("evaluated", version=5) == [], "nobody is still at it"
    assert told("generating", step=7) == ["generating"] == told("checkpoint saved", step=6)


def test_checkpoints_are_those_with_a_manifest(run_dir: RunDir) -> None:
    assert look_at_checkpoints(run_dir.checkpoints) == Checkpoints()
    for step in (5, 10):
        write_checkpoint(run_dir, step)
    (run_dir.checkpoints / ".tmp-step_15").mkdir()
    found = look_at_checkpoints(run_dir.checkpoints)
    assert (found.good, found.saving, found.damaged) == (10, 15, ()) and found.saved_unix_s is not None
    manifest = run_dir.checkpoint(10) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    run_dir.checkpoint(12).mkdir()
    (run_dir.checkpoint(12) / "manifest.json").symlink_to("/proc/self/mem")  # the kernel answers with an I/O error
    (run_dir.checkpoints / ".tmp-step_15").rmdir()
    found = look_at_checkpoints(run_dir.checkpoints)
    assert (found.good, found.damaged, found.unreadable, found.saving) == (5, (10,), (12,), None)


RL = {"time/step": 10.0, "time/batch": 10.0}


@pytest.mark.parametrize(("metrics", "said"), [
    (RL | {"time/wait_for_batch": 6.2, "time/generate": 9.0, "engine/idle_share": 0.1},
     "bottleneck: generation (trainer waits 62 % of a step)"),
    (RL | {"time/wait_for_batch": 5.0, "time/generate": 1.0, "time/update_weights": 4.0},
     "bottleneck: weight update (trainer waits 50 % of a step)"),
    (RL | {"time/wait_for_batch": 5.0, "time/generate": 1.0, "time/evaluate": 4.0},
     "bottleneck: evaluation (trainer waits 50 % of a step)"),
    (RL | {"time/wait_for_batch": 0.1, "engine/idle_share": 0.4},
     "bottleneck: training (engines are idle 40 % of the time)"),
    (RL | {"time/wait_for_batch": 0.5, "engine/idle_share": 0.08},
     "no bottleneck (trainer waits 5 % of a step, engines 8 % idle)"),
    ({"time/step": 1.0, "time/checkpoint": 0.3}, "bottleneck: checkpoints (training waits 30 % of the time for a "
     "save)"),
    ({}, None), ({"time/step": None}, None), ({"time/step": 1.0, "time/checkpoint": 0.01}, None),
])  # fmt: skip
def test_the_bottleneck_is_said_in_words_where_something_tells(metrics: dict[str, float], said: str | None) -> None:
    found = find_bottleneck([metrics, metrics])
    if found is None:
        assert said is None
        return
    shown, _, advice = str(found).partition("; what helps: ")
    assert shown == said and bool(advice) == (found.part != "none")


@pytest.mark.parametrize(("rounds", "advice"), [
    ([{}, {}], "a larger async_level, or with it orchestrator.schedule = 'rounds'"),
    ([{"rounds/played": 9.0, "rounds/slots_used": 0.98}, {"rounds/played": 0.0, "rounds/slots_used": 0.0}],
     "a larger orchestrator.client.max_concurrency"),
    ([{"rounds/played": 9.0, "rounds/slots_used": 0.5}] * 2, "a larger async_level"),
    ([{"rounds/played": 0.0, "rounds/slots_used": 0.0}], "a larger async_level"),
])  # fmt: skip
def test_the_advice_for_rounds_is_not_to_take_rounds(rounds: list[dict[str, float]], advice: str) -> None:
    metrics = RL | {"time/wait_for_batch": 6.0, "time/generate": 9.0}
    found = find_bottleneck([metrics | line for line in rounds])
    assert found is not None and found.advice == f"more engines, shorter answers, {advice}"


def test_the_wait_for_the_start_of_an_attempt_is_no_bottleneck() -> None:
    state = RunState(first_step=4)
    state.take_step(RL | {"step": 5, "time/step": 100.0, "time/wait_for_batch": 95.0}, unix_s=0.0)
    assert str(state.bottleneck).startswith("bottleneck: generation"), "it is all there is"
    state.take_step(RL | {"step": 6, "time/wait_for_batch": 0.0, "engine/idle_share": 0.5}, unix_s=1.0)
    assert str(state.bottleneck).startswith("bottleneck: training")


def test_the_time_left_is_the_mean_of_the_last_steps_times_those_that_are_left() -> None:
    state = RunState(max_steps=200)
    assert state.left_s is None
    for step in range(1, 101):
        state.take_step({"step": step, "time/step": 60.0 if step == 51 else 2.0}, unix_s=0.0)
    assert state.left_s == pytest.approx((49 * 2 + 5 * 2.0) / 50 * 100), "a step that waited for a start is cut"
    state.take_step({"step": 101}, unix_s=0.0)
    assert state.left_s == pytest.approx(2.0 * 99)
    state.max_steps = None
    assert state.left_s is None


def test_durations_and_the_line_of_a_step() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 725, 11240)] == ["0:00", "1:00", "12:05", "3:07:20"]
    line = step_line({"step": 3, "loss": 0.5, "time/step": 2.0}, 10, left_s=14.0)
    assert line.startswith("step  3/10") and line.endswith("left 0:14")
    assert "left" not in step_line({"step": 10, "loss": 0.5}, 10, left_s=0.0)


@contextmanager
def away(path: Path) -> Iterator[None]:
    """Have the storage answer no question about `path`."""
    stat = os.stat

    def fail(asked: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if asked == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(asked, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", fail)
        yield


def test_steps_that_could_not_be_read_at_first_are_no_news(run_dir: RunDir) -> None:
    write_steps(run_dir.metrics, 1, 2, 3)
    with away(run_dir.metrics):
        follower = Follower(run_dir, max_steps=10)
        follower.catch_up()
        assert list(follower.news()) == [] and follower.state.step == 0
    assert list(follower.news()) == [] and follower.state.step == 3
    with open(run_dir.metrics, "a") as file:
        file.write('{"step": 4}\n')
    (news,) = follower.news()
    assert isinstance(news, Stepped) and news.metrics["step"] == 4
    write_steps(run_dir.metrics, 1, 2)
    with unreadable(run_dir.metrics):
        assert list(follower.news()) == []
    assert list(follower.news()) == [] and follower.state.step == 2


def test_a_launcher_never_takes_an_old_step_for_its_last(run_dir: RunDir) -> None:
    write_steps(run_dir.metrics, 1, 2, 3)
    with away(run_dir.metrics):
        console = Console(run_dir, attempt=2, first_step=5, max_steps=10)
    console.refresh()
    assert console.last_step == 5
    write_steps(run_dir.metrics, 1, 2)
    console.refresh()
    assert console.last_step == 5


def test_the_newest_alarm_is_in_sight_whatever_came_before(run_dir: RunDir) -> None:
    shown = ObservedRun(run_dir, "run")
    state = shown.state

    def take(phase: str, time: float) -> None:
        state.take_event({"process": "trainer", "phase": phase, "time": time}, attempt=1)

    for number in range(150):
        take(f"ALERT: {number}" if number < 5 else f"WARNING: {number}", float(number))

    def said() -> list[str]:
        return [line for line in run_lines(shown, now=200.0) if line.startswith(("ALERT", "WARNING", "and"))]

    assert said() == ["ALERT: 3", "ALERT: 4", "WARNING: 149", "and 147 more"]
    for number in range(150, 260):
        take(f"ALERT: {number}", float(number))
    assert said() == ["ALERT: 257", "ALERT: 258", "ALERT: 259", "and 257 more"]


def test_an_alarm_is_one_line_that_no_terminal_acts_on() -> None:
    line = event_line(Alarm("warning", "trainer", "an environment says \x1b[2J\n" + "x" * 5000, 3, 100.0), seconds=1.0)
    assert "WARNING: an environment says \\x1b[2J\\nxxx" in line and line.isprintable()
    assert line.endswith("(5025 characters) (step 3)") and len(line) < 2200, line
