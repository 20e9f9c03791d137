"""Looking at the page of a run as a browser does."""

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.runs.processes import HANG_S, answer_when


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str


def request(port: int, path: str = "/", *, method: str = "GET", host: str | None = None) -> Reply:
    """Return the answer to a request that names the server `host`. Raises `OSError`: nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        found = connection.getresponse()
        return Reply(found.status, dict(found.getheaders()), found.read().decode())
    finally:
        connection.close()


def state_when(port: int, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first state for which `is_so` holds; who does not answer yet is asked again."""
    return answer_when(lambda: json.loads(request(port, "/state").text), is_so)


def page_when(port: int, is_so: Callable[[str], bool]) -> str:
    """Return the first page, less the library that draws, for which `is_so` holds."""
    tag = None
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        tag = state_when(port, lambda state, last=tag: state["tag"] not in (None, last))["tag"]
        page = request(port, "/update").text
        if is_so(page):
            return page
    raise AssertionError("no page was so")


def charts_in(page: str) -> dict[str, Any]:
    match = re.search(r'<script[^>]* id="figures"[^>]*>(.*?)</script>', page, re.S)
    assert match is not None
    return json.loads(match[1])


def curve_in(page: str, key: str = "loss") -> list[int]:
    """Return the steps of the first curve of a chart; none where it is not there yet."""
    charts = charts_in(page)
    return charts[key]["data"][0]["x"] if key in charts else []
