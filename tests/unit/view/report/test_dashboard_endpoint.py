"""The page of a run that goes on: what is answered, when it is made, and what it stands."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from holdfast.config.view import DashboardConfig
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.view.report import live
from holdfast.view.report import serve as builds
from holdfast.view.report.serve import Builds, Built, Dashboard, listening_for_browsers
from tests.builders.shown_runs import make_run
from tests.runs.dashboards import charts_in, curve_in, page_when, request, state_when
from tests.runs.processes import HANG_S, command_line, wait_until

Serve = Callable[[RunDir], tuple[Dashboard, int]]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that serves a run at a free port, and gives the endpoint and the port."""
    monkeypatch.setattr(builds, "_SHARE", 1.0)  # a test waits for nobody
    with ExitStack() as stack:

        def start(run_dir: RunDir) -> tuple[Dashboard, int]:
            listener = stack.enter_context(listening_for_browsers(DashboardConfig(port=0)))
            assert listener is not None
            return stack.enter_context(Dashboard(listener, run_dir)), listener.port

        yield start


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages follow each other at once."""
    init = Builds.__init__
    monkeypatch.setattr(Builds, "__init__", lambda self, *args: init(self, *args, pause_s=0.0))


def builders(run_dir: RunDir) -> list[psutil.Process]:
    """Return the processes that make a page of the run now."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if {builds.PROCESS, str(run_dir.path)} <= set(command_line(one))]


class Held:
    """Has every process that makes a page of the run wait in the middle of reading, until `let_go`."""

    def __init__(self, run_dir: RunDir) -> None:
        self._pipe = run_dir.logs(1) / "events_of_nobody.jsonl"
        os.mkfifo(self._pipe)  # reading it waits for who writes

    def let_go(self) -> None:
        """Have the process that waits, or comes there next, go on."""
        wait_until(self._is_let_go, "a process that reads")

    def _is_let_go(self) -> bool:
        try:
            writer = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            return False
        self._pipe.unlink()
        os.close(writer)
        return True


def train(run_dir: RunDir, *steps: int) -> None:
    writer = MetricsWriter(run_dir.metrics)
    for step in steps:
        writer.write(step, {"loss": 1 / step, "reward/mean": step / 100})
    writer.close()


def said(dashboard: Dashboard) -> list[str]:
    found: list[str] = []
    dashboard.look(found.append)
    return found


def test_a_page_grows_with_a_run(tmp_path: Path, serve: Serve, soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run", resumed_from=(4,))
    there = sorted(run_dir.path.rglob("*"))
    dashboard, port = serve(run_dir)
    assert capsys.readouterr().out == f"Dashboard: http://127.0.0.1:{port}/\n"
    early = request(port)
    assert early.status == 503 and "is being made" in early.text and 'http-equiv="refresh"' in early.text
    first = state_when(port, lambda state: state["tag"] is not None)
    assert first["run"] == run_dir.run_id() and first["trouble"] is None
    page, update = request(port), request(port, "/update?x=1")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "live: as of 2" in page.text and f'data-tag="{first["tag"]}"' in page.text
    assert f'data-command="uv run report {run_dir.path}"' in page.text
    assert "connect-src 'self';" in page.text
    assert len(page.text) > 4e6 > len(update.text) and charts_in(page.text) == charts_in(update.text)
    assert curve_in(update.text) == list(range(1, 13))
    assert [shape["x0"] for shape in charts_in(update.text)["loss"]["layout"]["shapes"]] == [4]
    train(run_dir, 13)
    later = page_when(port, lambda page: curve_in(page) == list(range(1, 14)))
    assert f'data-run="{first["run"]}"' in later and f'data-tag="{first["tag"]}"' not in later
    assert said(dashboard) == []
    assert sorted(run_dir.path.rglob("*")) == there, "nothing was written"


def test_nothing_is_made_where_nobody_asks_or_nothing_is_new(run_dir: RunDir, serve: Serve, soon: None) -> None:
    dashboard, port = serve(run_dir)
    asked = dashboard._builds._asked
    train(run_dir, 13)
    assert not asked.is_set() and builders(run_dir) == [] and dashboard._builds.built is None
    tag = state_when(port, lambda state: state["tag"] is not None)["tag"]
    for _ in range(20):
        assert state_when(port, lambda _: True)["tag"] == tag
        wait_until(lambda: not asked.is_set(), "a look at the files")
    assert builders(run_dir) == []


@pytest.mark.launch
def test_a_process_that_is_killed_is_told_where_one_looks_and_made_up_for(run_dir: RunDir, serve: Serve) -> None:
    dashboard, port = serve(run_dir)
    dashboard._builds._pause_s = 1.0
    held = Held(run_dir)
    request(port)
    wait_until(lambda: len(builders(run_dir)) == 1, "the process that makes the page")
    builders(run_dir)[0].kill()
    state_when(port, lambda state: state["trouble"] == "its process was killed by signal 9")
    failed = request(port)
    assert failed.status == 500 and "could not be made: its process was killed by signal 9" in failed.text
    assert said(dashboard) == [
        "WARNING: dashboard: the page is not made: its process was killed by signal 9. Training goes on"
    ]
    held.let_go()
    state_when(port, lambda state: state["trouble"] is None and state["tag"] is not None)
    assert request(port).status == 200 and said(dashboard) == []


def test_what_fails_late_is_tried_less_often(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try takes 100 s by the clock of this test, and every wait is over at once."""
    tries = ["fails"] * 6 + ["is made", "fails", "fails"]
    seconds, waited = 0.0, list[float | None]()
    found = Builds(run_dir, print, clock=lambda: seconds)

    def build() -> Built:
        nonlocal seconds
        seconds += 100.0
        train(run_dir, 12 + len(tries))  # something new to show
        if tries.pop(0) == "fails":
            raise RuntimeError("out of memory")
        return Built("tag", 2.0, b"", b"")

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            found.ask()
            if not tries:
                self.set()
            return True

    monkeypatch.setattr(found, "_build", build)
    monkeypatch.setattr(found, "_ended", Waits())
    found.ask()
    found._work()
    assert waited == pytest.approx([90, 180, 360, 720, 900, 900, 18, 90, 180])
    assert found.trouble == "out of memory"


@pytest.mark.launch
def test_files_that_cannot_be_read_leave_the_page_that_was_there(
    run_dir: RunDir, tmp_path: Path, serve: Serve, soon: None
) -> None:
    dashboard, port = serve(run_dir)
    tag = state_when(port, lambda state: state["tag"] is not None)["tag"]
    run_dir.metrics.rename(tmp_path / "kept")
    run_dir.metrics.mkdir()
    broken = state_when(port, lambda state: state["trouble"] is not None)
    assert "Is a directory" in broken["trouble"] and broken["tag"] == tag
    for _ in range(3):  # so it is tried again, and told once all the same
        request(port, "/state")
        wait_until(lambda: not dashboard._builds._asked.is_set(), "another try")
    assert request(port).status == 200
    run_dir.metrics.rmdir()
    (tmp_path / "kept").rename(run_dir.metrics)
    state_when(port, lambda state: state["trouble"] is None)
    assert len(said(dashboard)) == 1


@pytest.mark.launch
def test_a_process_that_hangs_is_ended(run_dir: RunDir, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_LIMIT_S", 1.0)
    dashboard, port = serve(run_dir)
    dashboard._builds._pause_s = HANG_S  # no other one begins
    Held(run_dir)
    state_when(port, lambda state: state["trouble"] is not None)
    assert "has not come to an end for 1 s" in request(port).text
    told: list[str] = []

    def hears() -> bool:
        dashboard.look(told.append)
        return told != []

    wait_until(hears, "what the console says")
    assert len(told) == 1 and builders(run_dir) == []


def test_no_process_is_started_behind_the_end(run_dir: RunDir) -> None:
    with Builds(run_dir, print) as found:
        pass
    with pytest.raises(InterruptedError):
        found._build()
    assert builders(run_dir) == []


@pytest.mark.launch
def test_one_process_at_a_time_gives_way_and_outlives_signals(run_dir: RunDir, serve: Serve) -> None:
    dashboard, port = serve(run_dir)
    held = Held(run_dir)
    request(port)
    wait_until(lambda: len(builders(run_dir)) == 1, "the process that makes the page")
    (process,) = builders(run_dir)
    oom_score = Path(f"/proc/{process.pid}/oom_score_adj")
    wait_until(lambda: process.nice() == 19 and oom_score.read_text() == "1000\n", "its priority")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
        assert request(port).status == 503
    assert builders(run_dir) == [process]
    held.let_go()
    state_when(port, lambda state: state["tag"] is not None)
    assert said(dashboard) == []


@pytest.mark.launch
def test_the_end_ends_the_process_that_makes_a_page(run_dir: RunDir) -> None:
    with listening_for_browsers(DashboardConfig(port=0)) as listener, Dashboard(listener, run_dir) as dashboard:
        assert listener is not None
        Held(run_dir)
        request(listener.port)
        wait_until(lambda: len(builders(run_dir)) == 1, "the process that makes the page")
        (process,) = builders(run_dir)
    assert not process.is_running() and said(dashboard) == []
    assert not dashboard._builds._thread.is_alive()
    with pytest.raises(OSError):
        request(listener.port)


def test_other_paths_names_and_methods_are_refused(run_dir: RunDir, serve: Serve) -> None:
    _, port = serve(run_dir)
    state_when(port, lambda state: state["tag"] is not None)
    for path in ("/run.json", "/../run.json", "/%2e%2e/run.json", f"/{run_dir.path}/run.json", "//[", "/logs/", ""):
        found = raw(port, f"GET {path or '?'} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 404 " in found and run_dir.run_id().encode() not in found
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "192.168.0.7"):
        for path in ("/", "/state", "/update"):
            found = request(port, path, host=host)
            assert found.status == 403 and run_dir.run_id() not in found.text
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "[::1]"):
        assert request(port, host=host).status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert request(port, "/state", method=method).status == 501
    whole, head = request(port), request(port, method="HEAD")
    assert head.status == 200 and head.text == ""
    assert head.headers["Content-Length"] == whole.headers["Content-Length"] == str(len(whole.text.encode()))
    assert whole.headers["X-Frame-Options"] == "DENY" and whole.headers["Cache-Control"] == "no-store"
    assert whole.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert not {"access-control-allow-origin"} & {name.lower() for name in whole.headers}


def raw(port: int, text: str) -> bytes:
    """Return all that comes back for some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(text.encode())
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_nothing_is_served_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening_for_browsers(None) as listener, Dashboard(listener, RunDir(tmp_path)) as dashboard:
        assert listener is None and said(dashboard) == []
    assert capsys.readouterr().out == ""


def test_a_page_names_the_installed_command(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_checkout", lambda: False)
    assert f'data-command="report {run_dir.path}"' in live.build(run_dir.path).update.decode()


def test_a_run_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / os.fsdecode(b"l\xffufe"))
    assert "l\\udcffufe" in live.build(run_dir.path).update.decode()


def test_sizes_and_times_of_files_that_go_away_are_passed_over(run_dir: RunDir, tmp_path: Path) -> None:
    names = [name for name, _, _ in builds._states(run_dir)]
    assert str(run_dir.metrics) in names and any("timeline_trainer" in name for name in names)
    (run_dir.logs(1) / "events_gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert [name for name, _, _ in builds._states(run_dir)] == names
