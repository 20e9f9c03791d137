"""A browser without a window, for pages that are opened, scrolled and looked at."""

import fcntl
import itertools
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.runs.processes import HANG_S, answer_when


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no browser to open the page in: `apt-get install chromium`")
    return found


def browser_command(profile: Path) -> list[str]:
    """Return what starts the browser with a profile of its own, from where nothing but this machine is reached."""
    return [
        browser(), "--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
        "--proxy-server=http://127.0.0.1:9", *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "--window-size=1200,900",
    ]  # fmt: skip


class OpenPage:
    """A page that stays open; a context manager. Chromium's protocol for its developer tools, over two pipes."""

    def __init__(self, profile: Path) -> None:
        words = [*browser_command(profile), "--proxy-bypass-list=127.0.0.1", "--remote-debugging-pipe"]
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()
        # It reads from descriptor 3 and writes to 4: these may be just that, in another order.
        commands, events = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (read, write))
        line = f"exec {shlex.join(words)} 3<&{commands} 4>&{events} {commands}<&- {events}>&-"
        self._process = subprocess.Popen(
            ["bash", "-c", line], pass_fds=(commands, events), stderr=subprocess.DEVNULL, start_new_session=True
        )
        for one in (read, write, commands, events):
            os.close(one)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable")
        self._call("Log.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def go_to(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def resize(self, width: int) -> None:
        """Show pages in a window of so many pixels; a narrow one is a phone's."""
        sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", **sizes)

    def evaluate(self, expression: str) -> Any:
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def when(self, expression: str, is_so: Callable[[Any], object] = bool) -> Any:
        """Return the first value of an expression for which `is_so` holds."""
        return answer_when(lambda: self.evaluate(expression), is_so)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (x, y) in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown" or (
                answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error"
            ):
                self.errors.append(json.dumps(answer["params"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + HANG_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            piece = os.read(self._from, 2**16)
            assert piece, "the browser has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)
