"""Pages in a browser: of a report, without a network and of a long run; and of a run that goes on, with its reader."""

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.report import make_journal, measure
from holdfast.protocol.rollouts import TokenIds
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir
from holdfast.view import serve
from holdfast.view.serve import HOST, LivePage, WebServer
from tests.builders.attempts import tell
from tests.builders.evaluations import evaluated
from tests.builders.sampled_rollouts import sampled_rollout
from tests.builders.shown_runs import make_run
from tests.conftest import BASE
from tests.runs.browser import OpenPage, browser_command
from tests.runs.ports import free_port
from tests.unit.commands.test_rollouts_cli import publish
from tests.unit.conftest import Command
from tests.unit.view.test_live_page import train
from tests.unit.view.test_report import figures_of, text_of

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
    page = (run_dir.path / "report.html").read_text()
    outside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.S)
    assert "default-src 'none'" in outside and not re.search(r"(src|href)=(?!\"#)|url\(|@import", outside)
    nonces = set(re.findall(r'nonce[=-]"?([\w-]+)', outside))
    assert len(nonces) == 1


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
        other = make_run(tmp_path / "other")
        with served(other, port):
            page.when(_LINE, lambda text: "another run is served here now" in text)
            assert page.evaluate(_LAST) == 15
        assert [error for error in page.errors if "ERR_CONNECTION" not in error and "503" not in error] == []
