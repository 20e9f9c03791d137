"""Signs of life: beats of real processes, answers of a real health route, and their absence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from triad.heartbeat import HEARTBEAT_ENV, PERIOD_S, Vitals, start_heartbeat

_BEAT = "import sys, time; from triad.heartbeat import start_heartbeat; start_heartbeat(sys.argv[1]); time.sleep(60)"


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
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


def test_a_stopped_part_makes_the_whole_silent(
    tmp_path: Path, beating: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    vitals = Vitals(tmp_path / "heartbeats" / "trainer")
    assert vitals.silent_s() == 0  # before the first beat: it may still import
    beating("")
    rank = beating("_rank_0")
    _until(lambda: len(list((tmp_path / "heartbeats").glob("*"))) == 2)
    beginning = time.monotonic()
    while time.monotonic() - beginning < 2.5 * PERIOD_S:
        assert vitals.silent_s() < 2 * PERIOD_S
        time.sleep(0.05)
    rank.send_signal(signal.SIGSTOP)
    _until(lambda: vitals.silent_s() > 3 * PERIOD_S)
    rank.send_signal(signal.SIGCONT)
    _until(lambda: vitals.silent_s() < PERIOD_S)


def test_a_new_process_is_not_blamed_for_the_silence_of_the_old(tmp_path: Path) -> None:
    prefix = tmp_path / "heartbeats" / "orchestrator"
    prefix.parent.mkdir()
    prefix.touch()
    vitals = Vitals(prefix)
    vitals.silent_s()
    _until(lambda: vitals.silent_s() > 0.1)
    vitals.forget()
    assert vitals.silent_s() == 0
    assert not prefix.exists()


def test_a_process_that_never_beats_is_silent_after_a_time_for_its_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("triad.heartbeat.awake_s", lambda: now)
    vitals = Vitals(tmp_path / "heartbeats" / "orchestrator")
    now += 30
    assert vitals.silent_s() == 0
    now += 5
    assert vitals.silent_s() == 5
    vitals.forget()
    assert vitals.silent_s() == 0


def test_a_part_that_has_ended_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_ENV, str(tmp_path / "heartbeats" / "trainer"))
    whole, rank = start_heartbeat(), start_heartbeat("_rank_0")
    vitals = Vitals(tmp_path / "heartbeats" / "trainer")
    _until(lambda: len(list((tmp_path / "heartbeats").glob("*"))) == 2)
    vitals.silent_s()
    rank.end()
    beginning = time.monotonic()
    while time.monotonic() - beginning < 2.5 * PERIOD_S:
        assert vitals.silent_s() < 2 * PERIOD_S
        time.sleep(0.05)
    whole.end()
    assert not list((tmp_path / "heartbeats").iterdir())


def test_a_heartbeat_outlives_a_storage_that_fails(
    tmp_path: Path, beating: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    folder, away = tmp_path / "heartbeats", tmp_path / "away"
    beating("")
    _until(lambda: (folder / "trainer").exists())
    folder.rename(away)
    folder.write_text("not a directory")
    time.sleep(1.5 * PERIOD_S)
    folder.unlink()
    _until(lambda: (folder / "trainer").exists())


class _Route(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def health_url() -> Iterator[str]:
    _Route.status = 200
    server = HTTPServer(("127.0.0.1", 0), _Route)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/health"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engine_that_beats_but_is_not_well_is_silent(tmp_path: Path, health_url: str) -> None:
    vitals = Vitals(tmp_path / "inference", health_url, probe_period_s=0.05)
    _until(lambda: vitals.silent_s() > 0)
    beginning = time.monotonic()
    while time.monotonic() - beginning < 1:
        assert vitals.silent_s() < 1
        time.sleep(0.01)
    _Route.status = 503
    _until(lambda: vitals.silent_s() > 1.5)
    vitals.forget()
    assert vitals.silent_s() == 0  # the next one may take its time to start
    _Route.status = 200
    _until(lambda: 0 < vitals.silent_s() < 0.5)
