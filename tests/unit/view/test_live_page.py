"""The page of a run that is trained: what is answered, when the page is made, and what its process survives."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.config import SftConfig
from holdfast.launcher.plan import Plan
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.side_processes import SideProcesses
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.view import serve
from holdfast.view.serve import HOST, LivePage, WebServer
from tests.builders.shown_runs import make_run
from tests.runs.dashboards import charts_in, curve_in, request, state_when
from tests.runs.ports import free_port
from tests.runs.processes import wait_until


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", resumed_from=(4,))


@pytest.fixture
def page(run_dir: RunDir) -> LivePage:
    return LivePage(run_dir.path)


@pytest.fixture
def port(page: LivePage) -> Iterator[int]:
    server = WebServer(HOST, 0, page.answer)
    yield server.port
    server.close()


def train(run_dir: RunDir, *steps: int) -> None:
    writer = MetricsWriter(run_dir.metrics)
    for step in steps:
        writer.write(step, {"loss": 1 / step, "reward/mean": step / 100})
    writer.close()


def test_a_page_grows_with_a_run(run_dir: RunDir, page: LivePage, port: int) -> None:
    there = sorted(run_dir.path.rglob("*"))
    early = request(port)
    assert early.status == 503 and "is being made" in early.text and 'http-equiv="refresh"' in early.text
    page.make()
    tag = page.tag
    assert state_when(port, bool) == {"run": run_dir.run_id(), "tag": tag, "trouble": None}
    whole, update = request(port), request(port, "/update?x=1")
    assert whole.status == 200 and whole.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "live: as of 2" in whole.text and f'data-tag="{tag}"' in whole.text
    assert f'data-command="uv run report {run_dir.path}"' in whole.text and "connect-src 'self';" in whole.text
    assert len(whole.text) > 4e6 > len(update.text) and charts_in(whole.text) == charts_in(update.text)
    assert curve_in(update.text) == list(range(1, 13))
    assert [shape["x0"] for shape in charts_in(update.text)["loss"]["layout"]["shapes"]] == [4]
    train(run_dir, 13)
    page.make()
    later = request(port, "/update").text
    assert curve_in(later) == list(range(1, 14)) and page.tag != tag
    assert sorted(run_dir.path.rglob("*")) == there, "nothing was written"


def test_files_that_cannot_be_read_leave_the_page_that_was_there(
    run_dir: RunDir, page: LivePage, port: int, tmp_path: Path
) -> None:
    page.make()
    run_dir.metrics.rename(tmp_path / "kept")
    run_dir.metrics.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        page.make()
    page.trouble = "Is a directory"  # as `keep` notes it
    assert request(port).status == 200 and state_when(port, bool)["trouble"] == "Is a directory"
    run_dir.metrics.rmdir()
    (tmp_path / "kept").rename(run_dir.metrics)
    page.make()
    assert state_when(port, bool)["trouble"] is None


def test_other_paths_names_and_methods_are_refused(run_dir: RunDir, page: LivePage, port: int) -> None:
    page.make()
    for path in ("/run.json", "/../run.json", "/%2e%2e/run.json", f"/{run_dir.path}/run.json", "//[", "/logs/", "?"):
        with socket.create_connection((HOST, port), timeout=60) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            found = b"".join(iter(lambda connection=connection: connection.recv(2**16), b""))
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


def test_a_run_whose_name_is_no_text_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "is_checkout", lambda: False)
    run_dir = make_run(tmp_path / os.fsdecode(b"l\xffufe"))
    run_dir.batch(99).mkdir(parents=True)  # a note names it
    page = LivePage(run_dir.path)
    page.make()
    assert "l\\udcffufe/rollouts/step_99" in page.update.decode() and 'data-command="report ' in page.update.decode()


def _settings(run_dir: RunDir, port: int) -> SftConfig:
    return SftConfig.model_validate({"output_dir": str(run_dir.path), "dashboard": {"port": port}})


@pytest.mark.launch
def test_a_page_whose_process_is_killed_is_served_again(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()

    def process() -> psutil.Process:
        beside.look(print)
        return next(one for one in psutil.Process().children() if "holdfast.view.serve" in one.cmdline())

    with SideProcesses(Plan(Attempt(run_dir, 1, None), {}, _settings(run_dir, port), [])) as beside:
        first = process()
        state_when(port, lambda state: state["tag"] is not None)
        assert first.nice() == 19 and Path(f"/proc/{first.pid}/oom_score_adj").read_text() == "1000\n"
        assert f"http://{HOST}:{port}/" in (run_dir.logs(1) / "events.jsonl").read_text()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            first.send_signal(number)
            assert request(port).status == 200
        first.kill()

        def is_back() -> bool:
            beside.look(print)
            try:
                return request(port, "/state").status == 200
            except OSError:
                return False

        wait_until(is_back, "another process")
        second = process()
    assert not second.is_running() and capfd.readouterr().out == ""
    with pytest.raises(OSError):
        request(port)
