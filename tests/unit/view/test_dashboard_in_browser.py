"""The page of a run that goes on, open in a browser: it takes what is new, and the reader keeps the place."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.run.run_dir import RunDir
from holdfast.view import serve
from holdfast.view.serve import HOST, LivePage, WebServer
from tests.builders.shown_runs import make_run
from tests.runs.browser import OpenPage
from tests.runs.ports import free_port
from tests.unit.view.test_live_page import train

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


def alert(run_dir: RunDir, text: str) -> None:
    with open(run_dir.logs(1) / "events.jsonl", "a") as file:
        file.write("\n" + json.dumps({"time": 1.8e9, "process": "trainer", "phase": f"ALERT: {text}"}) + "\n")


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
                alert(run_dir, f"number {number}")
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
