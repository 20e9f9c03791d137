"""The page of a run that is trained: what is answered, and what its process survives; and pages in a browser."""

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from benchmarks.report import make_journal, measure
from holdfast.config import SftConfig
from holdfast.launcher.plan import Plan
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.side_processes import SideProcesses
from holdfast.process import imports
from holdfast.protocol.rollouts import TokenIds
from holdfast.run import atomic
from holdfast.run.journal import TrainedRewards, note_trained
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.view import serve
from holdfast.view.serve import HOST, LivePage, WebServer
from tests.builders.attempts import tell
from tests.builders.evaluations import evaluated
from tests.builders.sampled_rollouts import sampled_rollout
from tests.builders.shown_runs import make_run
from tests.conftest import BASE
from tests.runs.browser import OpenPage, browser_command
from tests.runs.dashboards import charts_in, curve_in, request, state_when
from tests.runs.ports import free_port
from tests.runs.processes import wait_until
from tests.unit.commands.test_rollouts_cli import publish
from tests.unit.conftest import Command
from tests.unit.view.test_report import figures_of, text_of


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
    assert curve_in(request(port, "/update").text) == list(range(1, 14)) and page.tag != tag
    assert sorted(run_dir.path.rglob("*")) == there, "nothing was written"


def test_unreadable_files_leave_the_page_as_it_was(run_dir: RunDir, page: LivePage, port: int, tmp_path: Path) -> None:
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
    monkeypatch.setattr(imports, "is_checkout", lambda: False)
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


HOSTILE = '</script><img src=x onerror="document.documentElement.dataset.hit=1">'


def opened(page: Path, place: Path) -> tuple[str, list[str]]:
    """Return what a browser makes of a page, and what its console says. Nothing outside can be reached."""
    flags = ("--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom")
    argv = [*browser_command(place), *flags, page.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.docs
def test_the_page_draws_every_chart_and_runs_nothing_of_the_run(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "<img src=x onerror=alert()>", resumed_from=(4,))
    evaluated(run_dir, 4)
    settings = f"[model]\nname = \"{BASE}\"\nnote = '{HOSTILE}'\n"
    atomic.write_file(run_dir.configs(2) / "orchestrator.toml", settings.encode())
    tell(run_dir, "trainer", f"ALERT: {HOSTILE}", attempt=2, time=1.8e9)
    ids = Tokenizer.from_file(str(BASE / "tokenizer.json")).encode(HOSTILE, add_special_tokens=False).ids
    rollout = sampled_rollout(0.0, sampled=len(ids) - 1, environment=HOSTILE, token_ids=TokenIds(ids))
    publish(run_dir, 2, rollouts=[rollout])
    page = tmp_path / "page.html"
    assert run_command("report", run_dir.path, "--to", page)[0] == 0
    shown, said = opened(page, tmp_path / "profile")
    assert said == []
    num_charts = len([key for key in figures_of(page) if not key.startswith("other")])
    assert num_charts > 8 and f'data-charts="{num_charts}"' in shown
    assert shown.count('class="main-svg"') >= num_charts
    assert shown.count('data-title="Download plot as a PNG"') == num_charts
    assert "data-hit" not in re.sub(r"<script.*?</script>", "", shown, flags=re.S)
    assert "<img src" not in shown and "&lt;img src=x" in shown
    assert "ALERT: &lt;/script&gt;" in shown and 'note = "&lt;/script&gt;' in shown


def test_the_page_names_no_place_to_load_from(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert run_command("report", run_dir.path)[0] == 0
    outside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", (run_dir.path / "report.html").read_text(), flags=re.S)
    assert "default-src 'none'" in outside and not re.search(r"(src|href)=(?!\"#)|url\(|@import", outside)
    assert len(set(re.findall(r'nonce[=-]"?([\w-]+)', outside))) == 1


@pytest.mark.docs
def test_the_answers_on_the_page_are_sorted_and_searched(run_command: Command, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    made = [sampled_rollout(reward, task_id=task) for task, reward in enumerate((0.5, -2.0, 10.0, 0.25))]
    made[2].right_answer = f"Needle {HOSTILE}"
    publish(run_dir, 2, rollouts=made)
    note_trained(run_dir, 2, TrainedRewards([0.5, -2.0, 10.0, 0.25], [None, -1.5, 1e-9, 0.5]))
    page = tmp_path / "page.html"
    assert run_command("report", run_dir.path, "--to", page)[0] == 0
    rows = (
        "[...document.querySelectorAll('.answers tbody tr')].filter((one) => !one.hidden)"
        ".map((one) => one.cells[2].textContent).join()"
    )
    search = (
        "{{ const one = document.querySelector('.search'); one.value = '{}'; "
        "one.dispatchEvent(new Event('input', {{ bubbles: true }})); }}"
    )
    with OpenPage(tmp_path / "profile") as opened_page:
        opened_page.go_to(page.as_uri())
        opened_page.when("document.documentElement?.dataset.charts")
        heads = opened_page.evaluate("[...document.querySelectorAll('.answers th')].map((one) => one.textContent)")
        seen = [opened_page.evaluate(rows)]
        for name in ("reward", "reward", "advantage"):
            opened_page.evaluate(f"document.querySelectorAll('.answers th button')[{heads.index(name)}].click()")
            seen.append(opened_page.evaluate(rows))
        for words in ("needle reverse", "needle", ""):
            opened_page.evaluate(search.format(words))
            seen.append(opened_page.evaluate(rows))
        assert opened_page.errors == []
    assert seen == ["0,1,2,3", "1,3,0,2", "2,0,3,1", "1,2,3,0", "", "2", "1,2,3,0"]


@pytest.mark.clock
def test_a_long_run_takes_seconds_and_a_bounded_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=10_000, metrics=42, resumed_from=(2500, 5000, 7500))
    make_journal(run_dir, 10_000)
    cost = measure(run_dir.path)
    # Of a core, not of the wall clock: that of a busy machine says nothing.
    assert cost.cpu_s < 20 and cost.memory_bytes < 1e9 and cost.page_bytes < 10e6
    page = run_dir.path / "page.html"
    assert len(figures_of(page)["reward"]["data"][0]["x"]) <= 1000
    assert "the last 6,000 of" in text_of(page) and text_of(page).count('class="rollout') == 16


_LINE = "document.getElementById('live').textContent"
_LAST = "document.querySelector('[data-figure=reward]').data[0].x.at(-1)"
_OPEN = "[...document.querySelectorAll('details')].map((one) => one.open)"
_RANGE = "document.querySelector('[data-figure=reward]').layout.xaxis.range"


@contextmanager
def served(run_dir: RunDir, port: int) -> Iterator[None]:
    """Serve the page of a run, as its process does."""
    page = LivePage(run_dir.path)
    server = WebServer(HOST, port, page.answer)
    threading.Thread(target=page.keep, daemon=True).start()
    yield
    server.close()


def top_of(page: OpenPage, selector: str) -> Any:
    return page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().top")


@pytest.mark.docs
def test_the_reader_keeps_the_place_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_SHARE", 1.0)
    monkeypatch.setattr(serve, "_PAUSE_S", 0.0)
    run_dir = make_run(tmp_path / "run")
    port = free_port()
    with OpenPage(tmp_path / "profile") as page:
        with served(run_dir, port):
            page.go_to(f"http://127.0.0.1:{port}/")
            page.when("document.documentElement?.dataset.charts")  # by way of the page that says it is being made
            assert page.evaluate(_LINE).startswith("live: as of 2") and page.evaluate(_LAST) == 12
            tag = page.evaluate("document.getElementById('live').dataset.tag")
            assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
            page.evaluate("window.isTheSame = true")
            # Look closer into a chart, open what is folded, hide a curve, and go on to the rollouts' end of the page.
            page.evaluate("document.querySelector('[data-figure=reward]').scrollIntoView({block: 'center'})")
            chart = "document.querySelector('[data-figure=reward] .nsewdrag').getBoundingClientRect()"
            place = page.evaluate(f"(({{left, top, width, height}}) => ({{left, top, width, height}}))({chart})")
            middle = place["top"] + place["height"] / 2
            page.drag((place["left"] + 0.3 * place["width"], middle), (place["left"] + 0.6 * place["width"], middle))
            low, high = page.when(_RANGE, lambda found: found[1] - found[0] < 6)
            page.evaluate("document.querySelectorAll('details').forEach((one, number) => { one.open = number < 2; })")
            opened = page.evaluate(_OPEN)
            assert opened[:2] == [True, True] and len(opened) >= 2
            page.evaluate("document.body.style.paddingBottom = '2000px'")
            page.evaluate("document.getElementById('settings').scrollIntoView()")
            before = top_of(page, "#settings details")
            assert page.evaluate("scrollY") > 500
            train(run_dir, 13)
            for number in range(30):  # a table that grows above where the reader is
                tell(run_dir, "trainer", f"ALERT: number {number}", time=1.8e9)
            page.when(_LAST, lambda step: step == 13)
            page.when("document.getElementById('table-alerts').textContent.includes('number 29')")
            assert page.evaluate("window.isTheSame") is True, "it was not loaded again"
            assert page.evaluate("document.getElementById('live').dataset.tag") == tag
            assert abs(top_of(page, "#settings details") - before) < 2
            assert page.evaluate(_OPEN) == opened and page.evaluate(_RANGE) == [low, high]
            # What is selected stays until the reader lets go of it.
            page.evaluate("getSelection().selectAllChildren(document.querySelector('#facts td'))")
            train(run_dir, 14)
            page.when(_LINE, lambda text: text.endswith("newer is there, and shown when nothing is selected"))
            assert page.evaluate("String(getSelection())") == "run" and page.evaluate(_LAST) == 13
            page.evaluate("getSelection().removeAllRanges()")
            page.when(_LAST, lambda step: step == 14)
            page.when("document.querySelector('#facts').textContent.includes('14 of 12')")
        page.when(_LINE, lambda text: "nobody answers since 2" in text)
        assert f'"uv run report {run_dir.path}" makes the file' in page.evaluate(_LINE)
        # The launcher is started again: the page goes on.
        train(run_dir, 15)
        with served(run_dir, port):
            page.when(_LAST, lambda step: step == 15)
            assert page.when(_LINE, lambda text: text.startswith("live: as of 2"))
            assert page.evaluate(_OPEN) == opened and page.evaluate("window.isTheSame") is True
        with served(make_run(tmp_path / "other"), port):
            page.when(_LINE, lambda text: "another run is served here now" in text)
            assert page.evaluate(_LAST) == 15
        assert [error for error in page.errors if "ERR_CONNECTION" not in error and "503" not in error] == []
