"""Serves the live page of a run, in a process of its own beside the launcher: `python -m holdfast.view.serve RUN PORT`.

`/` is the page of `report` with a line that says that it is live. Its script polls `/state` and loads changes from
`/update`. No path leads to a file. The page is made if somebody looks; nothing is written. `WebServer` also answers
Prometheus.
"""

import html
import json
import os
import secrets
import shlex
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from holdfast.config.base import is_loopback, names_this_machine
from holdfast.errors import ConfigError
from holdfast.process import events
from holdfast.process.child import die_with_launcher, run_reporting_errors, set_thread_environment
from holdfast.process.imports import to_type
from holdfast.run.run_dir import RunDir

HOST = "127.0.0.1"
_PAUSE_S = 5.0
_SHARE = 0.1
"""Largest share of a core that it takes, as long as somebody looks."""
_CLIENT_TIMEOUT_S = 10.0
_HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Response:
    """The answer to a request."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


class WebServer(socketserver.ThreadingTCPServer):
    """Answers GET requests in threads until `close`. On a loopback address only requests that name this machine count.
    `answer`: from the path of a request to its answer. Raise ConfigError if the address is in use, or not an address of
    this machine."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, answer: Callable[[str], Response]) -> None:
        host = host.strip("[]")
        self.answer, self.is_local = answer, is_loopback(host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}") from None
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, name="web", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: WebServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _CLIENT_TIMEOUT_S
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        if self.server.is_local and not names_this_machine(self.headers.get("Host", "")):
            # A page in a browser may give its own name the address 127.0.0.1.
            found = Response(403, b"only for this machine: address it as 127.0.0.1, ::1 or localhost\n")
        else:
            found = self.server.answer(self.path.partition("?")[0])
        self.send_response(found.status)
        headers = {
            "Content-Type": found.kind,
            "Content-Length": str(len(found.body)),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(found.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class LivePage:
    """The newest page of a run.

    Attributes:
        tag: differs for each page; None before the first.
        page, update: the page, and the same without plotly.js for a page that is open.
        trouble: why the page is older than the files of the run; None if all is well.
    """

    def __init__(self, run: Path) -> None:
        self._run_dir = RunDir(run)
        self._run_id = self._run_dir.run_id()
        self._asked = threading.Event()
        self.tag: str | None = None
        self.page = self.update = b""
        self.trouble: str | None = None

    def answer(self, path: str) -> Response:
        if path not in ("/", "/state", "/update"):
            return Response(404, b"the page of the run is at /\n")
        self._asked.set()
        if path == "/state":
            state = {"run": self._run_id, "tag": self.tag, "trouble": self.trouble}
            return Response(200, json.dumps(state).encode(), "application/json")
        if self.tag is not None:
            return Response(200, self.page if path == "/" else self.update, _HTML)
        text = "The page is being made." if self.trouble is None else f"The page cannot be made: {self.trouble}"
        return Response(503, _WAITING.format(html.escape(text)).encode(), _HTML)

    def keep(self) -> None:
        """Make the page again whenever somebody looks; never returns."""
        while True:
            self._asked.wait()
            self._asked.clear()
            begin = time.process_time()
            try:
                self.make()
            except Exception as error:  # noqa: BLE001 - the page says it, and the next look tries again
                traceback.print_exception(error)
                self.trouble = str(error) or type(error).__name__
            time.sleep(max(_PAUSE_S, (time.process_time() - begin) * (1 / _SHARE - 1)))

    def make(self) -> None:
        """Make the page. Raise HoldfastError or OSError if the files of the run cannot be read."""
        # Not at the top: these take seconds, and this process has given way by now.
        from holdfast.view.report import Live, library, page_of, read_runs, render

        (data,) = read_runs([self._run_dir.path])
        place = shlex.quote(str(data.run_dir.path))
        live = Live(secrets.token_hex(8), self._run_id, to_type(f"report {place}"))
        page = page_of([data])
        self.page, self.update = (render(page, script, live=live).encode() for script in (library(), ""))
        self.tag, self.trouble = live.tag, None


_WAITING = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="2">
<link rel="icon" href="data:,"><title>holdfast</title></head>
<body><p>{}</p></body>
</html>
"""


def main() -> None:
    """Serve the page of the run that the command line names; never returns."""
    # Only SIGTERM of the launcher ends this process: a scheduler may signal every process.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the launcher holds it back until now
    os.nice(19)
    set_thread_environment(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # ends first if memory does
    page = LivePage(Path(sys.argv[1]))
    server = WebServer(HOST, int(sys.argv[2]), page.answer)
    events.report("ready", url=f"http://{HOST}:{server.port}/")
    page.keep()


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(main)
