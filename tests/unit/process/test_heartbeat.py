"""Signs of life of real processes and health routes, and their absence; how a program of others has ended."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fastapi import FastAPI, Response

from holdfast.launcher.liveness import Health, LivenessMonitor, place_of_beats
from holdfast.process.heartbeat import HEARTBEAT_ENV, does, meanwhile, start_heartbeat
from holdfast.process.noted_end import Ending
from tests.runs.processes import wait_until
from tests.servers.quick_server import served

PERIOD_S = 0.1
_BEAT = (
    f"import sys, time; from holdfast.process import heartbeat; heartbeat.PERIOD_S = {PERIOD_S}; "
    "heartbeat.start_heartbeat(sys.argv[1]); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("holdfast.process.heartbeat", "holdfast.launcher.liveness"):
        monkeypatch.setattr(f"{module}.PERIOD_S", PERIOD_S)


def _watch(monitor: LivenessMonitor, seconds: float) -> None:
    """Listen for so long, in which who does not beat falls silent; a busy machine may listen late."""
    beginning = time.monotonic()
    while time.monotonic() - beginning < seconds:
        monitor.silent_s()
        time.sleep(0.01)


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Return a starter of processes that beat, given the end of the name."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, HEARTBEAT_ENV: str(tmp_path / "heartbeats" / "trainer")}
        started.append(subprocess.Popen([sys.executable, "-c", _BEAT, name], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_stopped_part_silences_the_whole(tmp_path: Path, beating: Callable[[str], subprocess.Popen[bytes]]) -> None:
    monitor = LivenessMonitor(tmp_path / "heartbeats" / "trainer")
    assert monitor.silent_s() == 0  # before the first beat: it may still import
    beating("")
    rank = beating("_rank_0")
    wait_until(lambda: len(list((tmp_path / "heartbeats").glob("*"))) == 2)
    _watch(monitor, 2.5 * PERIOD_S)
    wait_until(lambda: monitor.silent_s() < PERIOD_S)
    rank.send_signal(signal.SIGSTOP)
    wait_until(lambda: monitor.silent_s() > 3 * PERIOD_S)
    rank.send_signal(signal.SIGCONT)
    wait_until(lambda: monitor.silent_s() < PERIOD_S)


def test_who_never_beats_is_silent_after_time_for_its_imports(tmp_path: Path, clock: Callable[[float], None]) -> None:
    monitor = LivenessMonitor(tmp_path / "orchestrator")
    for number in range(3):
        clock(30)
        assert monitor.silent_s() == 0, "it imports"
        clock(5)
        assert monitor.silent_s() == 5
        if number == 1:  # this one beats, and the next one has to beat itself
            (tmp_path / "orchestrator").write_text("{}")
            assert monitor.silent_s() == 0
            clock(500)
        monitor.forget()
        assert monitor.silent_s() == 0 and not (tmp_path / "orchestrator").exists()


def test_a_part_that_has_ended_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_ENV, str(tmp_path / "heartbeats" / "trainer"))
    whole, rank = start_heartbeat(), start_heartbeat("_rank_0")
    monitor = LivenessMonitor(tmp_path / "heartbeats" / "trainer")
    wait_until(lambda: len(list((tmp_path / "heartbeats").glob("*"))) == 2)
    monitor.silent_s()
    rank.end()
    _watch(monitor, 2.5 * PERIOD_S)
    wait_until(lambda: monitor.silent_s() < PERIOD_S)
    whole.end()
    assert not list((tmp_path / "heartbeats").iterdir())


def test_a_heartbeat_outlives_its_storage(tmp_path: Path, beating: Callable[[str], subprocess.Popen[bytes]]) -> None:
    folder = tmp_path / "heartbeats"

    def point_to(place: Path) -> None:
        """Let the folder be another one, in one step: a process may be about to write."""
        (tmp_path / "link").symlink_to(place)
        (tmp_path / "link").replace(folder)

    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").write_text("not a directory")
    point_to(tmp_path / "whole")
    beating("")
    wait_until(lambda: (folder / "trainer").exists())
    point_to(tmp_path / "broken")
    (tmp_path / "whole" / "trainer").unlink(missing_ok=True)
    time.sleep(1.5 * PERIOD_S)
    point_to(tmp_path / "whole")
    wait_until(lambda: (folder / "trainer").exists())


def test_a_full_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setenv(HEARTBEAT_ENV, str(tmp_path / "trainer"))
    beat = start_heartbeat()
    monitor = LivenessMonitor(tmp_path / "trainer")
    wait_until(beat.path.exists if beat.path else bool)
    _watch(monitor, 2.5 * PERIOD_S)
    wait_until(lambda: monitor.silent_s() < PERIOD_S)
    beat.end()
    assert [record.getMessage() for record in caplog.records] == [
        f"heartbeats are not written whole: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}"
    ], "once: it may take hours"


def test_beats_of_directories_with_one_name_lie_apart(tmp_path: Path) -> None:
    """As containers have them that share their memory."""
    run = tmp_path / "run"
    run.mkdir()
    with place_of_beats(run) as one:
        run.rename(tmp_path / "other")
        run.mkdir()
        with place_of_beats(run) as other:
            assert one != other and one.is_dir() and other.is_dir()
            assert not os.access("/dev/shm", os.W_OK) or one.parent == Path("/dev/shm"), "no disk can fill up there"
    with place_of_beats(run) as again:
        assert again == other


def test_a_place_of_beats_of_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, elsewhere, run = (tmp_path / name for name in ("memory", "elsewhere", "run"))
    for directory in (memory, elsewhere, run):
        directory.mkdir()
    monkeypatch.setattr("holdfast.launcher.liveness._MEMORY", memory)
    with place_of_beats(run) as usual:
        assert usual.parent == memory
    for make in (lambda: usual.symlink_to(elsewhere), usual.touch):
        make()
        with place_of_beats(run) as own:
            assert own.is_dir() and own.parent != memory and own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
        usual.unlink()
    assert elsewhere.is_dir()


@pytest.fixture
def health() -> Iterator[SimpleNamespace]:
    """A route that answers with a `status`, after `delay_s`."""
    app, route = FastAPI(), SimpleNamespace(status=200, delay_s=0.0)

    @app.get("/health")
    async def answer() -> Response:
        await asyncio.sleep(route.delay_s)
        return Response(status_code=route.status)

    with served(app) as url:
        route.url = f"{url}/health"
        yield route


def test_an_engine_that_beats_but_is_not_well_is_silent(tmp_path: Path, health: SimpleNamespace) -> None:
    monitor = LivenessMonitor(tmp_path / "inference", Health(health.url), probe_period_s=0.05)
    wait_until(lambda: monitor.silent_s() > 0)
    _watch(monitor, 0.3)
    wait_until(lambda: monitor.silent_s() < 0.2)
    health.status = 503
    wait_until(lambda: monitor.silent_s() > 0.5)
    monitor.forget()
    assert monitor.silent_s() == 0  # the next one may take its time to start
    health.status = 200
    wait_until(lambda: 0 < monitor.silent_s() < 0.2)
    monitor.end()


def test_an_answer_may_take_its_time(tmp_path: Path, health: SimpleNamespace) -> None:
    health.delay_s = 0.5
    hasty = LivenessMonitor(tmp_path / "hasty", Health(health.url, timeout_s=0.05), probe_period_s=0.05)
    patient = LivenessMonitor(tmp_path / "patient", Health(health.url, timeout_s=300), probe_period_s=0.05)
    wait_until(lambda: patient.is_well)
    assert not hasty.is_well
    for monitor in (hasty, patient):
        monitor.end()


def test_what_is_done_meanwhile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_ENV, str(tmp_path / "trainer."))
    heartbeat = start_heartbeat()
    try:
        does("step 3", bound_s=5.0)
        moves = heartbeat.beat.moves
        with meanwhile("writing the profile", bound_s=70.0):
            assert (heartbeat.beat.doing, heartbeat.beat.bound_s) == ("writing the profile", 70.0)
        assert (heartbeat.beat.doing, heartbeat.beat.bound_s) == ("step 3", 5.0)
        assert heartbeat.beat.moves == moves + 2
    finally:
        heartbeat.end()


def test_a_program_that_is_asked_to_end_has_the_time_to_clear_up() -> None:
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.3); print('cleared up', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\nwhile True: time.sleep(10)\n"
    )
    ending = Ending()
    command = ending.command(sys.executable, "-c", program)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as between:
        assert between.stdout is not None and between.stdout.readline() == "ready\n"
        os.killpg(between.pid, signal.SIGTERM)
        assert between.stdout.read() == "cleared up\n"
    assert between.returncode == 0 and ending.is_from_outside(), "it would not have ended by itself"
    ending.close()


@pytest.mark.parametrize(("script", "is_killed"), [
    ("kill -KILL $$", True), ("sh -c 'kill -KILL $$'; exit $?", True), ("kill -SEGV $$", False), ("exit 0", False),
    ("exit 1", False), ("exit 127", False),
])  # fmt: skip
def test_a_program_that_was_killed_is_told_from_one_that_ended(script: str, is_killed: bool) -> None:
    ending = Ending()
    subprocess.run(ending.command("sh", "-c", script), check=False)
    assert ending.is_from_outside() == is_killed
    ending.close()


@pytest.mark.parametrize(("has_session", "is_stopped"), [(False, True), (True, False)])
def test_what_a_shell_of_the_policy_stops_is_not_a_stopped_server(has_session: bool, is_stopped: bool) -> None:
    """Where a program such as `uv run` starts the server, that is a child without a session of its own."""
    job = f"subprocess.Popen(['sh', '-c', 'kill -STOP $$'], start_new_session={has_session})"
    program = f"import os, subprocess\nos.waitpid({job}.pid, os.WUNTRACED)\nprint('stopped', flush=True)\ninput()"
    ending, pipe = Ending(), subprocess.PIPE
    command = ending.command(sys.executable, "-c", program)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as between:
        assert between.stdout is not None and between.stdout.readline() == "stopped\n"
        assert ending.is_stopped() == is_stopped
        for one in psutil.Process(between.pid).children(recursive=True):
            one.kill()
    ending.close()
