"""Serves the live page of a run from the launcher, and has it made when a browser asks and the files have changed.

One process at a time makes the page. The process dies with the launcher, has the lowest priority, and hands the page
over in a pipe: no file is written. `/` is the page of `report` with a line that says that it is live. Its script polls
`/state` and loads changes from `/update`. No path leads to a file.
"""

from __future__ import annotations

import html
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message

import msgspec

from holdfast.config.view import DashboardConfig
from holdfast.process.child import LAUNCHER_ENV
from holdfast.process.imports import module_command
from holdfast.run.run_dir import RunDir
from holdfast.view.web import Listener, Response, WebServer, listening

PROCESS = "holdfast.view.report.live"
"""Its module, which is started and not imported."""


class Built(msgspec.Struct):
    """A page as it was made.

    Attributes:
        tag: no other page has it.
        cpu_s: seconds of a core that it took.
        page: the whole of it.
        update: the same less the library that draws: for a page that is open.
    """

    tag: str
    cpu_s: float
    page: bytes
    update: bytes


_SHARE = 0.1
"""Of the time of a core, at most, as long as somebody looks."""
_PAUSE_S = 5.0
_LIMIT_S = 600.0
_DYING_S = 5.0
_FIRST_COUNTED_S = 10.0
"""Of a try that failed, at most: what was wrong may be over soon. Of each that fails behind it, twice as much."""
_LONGEST_REASON = 500


class Builds:
    """Makes the pages of one run, in a thread; a context manager.

    Attributes:
        built: the newest page; None before the first.
        trouble: why there is none that is newer, although there should be; None where all is well.

    Args:
        tell: takes what is to be said in the console.
        pause_s: between two pages, at least.
        clock: gives seconds, of no matter which time.
    """

    def __init__(
        self,
        run_dir: RunDir,
        tell: Callable[[str], None],
        *,
        pause_s: float = _PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.built: Built | None = None
        self.trouble: str | None = None
        self._run_dir = run_dir
        self._tell = tell
        self._pause_s = pause_s
        self._clock = clock
        self._most_counted_s = _FIRST_COUNTED_S
        self._asked, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of what is started and what is ended
        self._process: subprocess.Popen[bytes] | None = None
        self._files: object = None
        # It stays until the end: the kernel ends a process also when the thread is over that has started it.
        self._thread = threading.Thread(target=self._work, name="dashboard-builds", daemon=True)

    def __enter__(self) -> Builds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended.set()
            if self._process is not None:
                self._process.kill()
        self._asked.set()
        self._thread.join(_DYING_S)

    def ask(self) -> None:
        """Have a page made, if there is something new to show."""
        self._asked.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            self._asked.wait()
            self._asked.clear()
            begin = self._clock()
            try:
                cost_s = self._make_if_new()
                self._most_counted_s = _FIRST_COUNTED_S
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on; said where one looks
                # Nobody knows how much of a core it was.
                cost_s = min(self._clock() - begin, self._most_counted_s)
                self._most_counted_s *= 2
                if not self._ended.is_set():
                    trouble = str(error) or type(error).__name__
                    self._tell(f"the page is not made: {trouble}. Training goes on")
                    self.trouble = trouble
            if cost_s:
                self._ended.wait(max(self._pause_s, cost_s * (1 / _SHARE - 1)))

    def _make_if_new(self) -> float:
        """Make the page, unless the newest shows all that is there; return what it took of a core, in seconds."""
        files = tuple(_states(self._run_dir))
        if self.trouble is None and self.built is not None and files == self._files:
            return 0.0
        self.built = self._build()
        self.trouble, self._files = None, files
        return self.built.cpu_s

    def _build(self) -> Built:
        argv = module_command(PROCESS, str(self._run_dir.path))
        with self._lock:
            if self._ended.is_set():
                raise InterruptedError("the launcher ends")
            process = self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, LAUNCHER_ENV: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )
        try:
            output, errors = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.trouble = f"its process has not come to an end for {_LIMIT_S:g} s"
            process.kill()
            process.communicate()  # where a storage holds it, no other one waits there as well
            raise TimeoutError(self.trouble) from None
        finally:
            with self._lock:
                self._process = None
        if process.returncode != 0:
            raise RuntimeError(_reason(errors.decode(errors="replace"), process.returncode))
        return msgspec.msgpack.decode(output, type=Built)


def _reason(errors: str, code: int) -> str:
    """Return what a process said at its end: its `error:`, or the last line of what else it wrote."""
    _, mark, told = f"\n{errors.strip()}".rpartition("\nerror: ")
    told = told if mark else told.rpartition("\n")[2]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return told[:_LONGEST_REASON] or f"its process {how}"


def _states(run_dir: RunDir) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of what a page is made of: of a directory, when something came or went."""
    logs = run_dir.path / "logs"
    there = [run_dir.metrics, run_dir.checkpoints, run_dir.rollouts, run_dir.path / "configs", run_dir.evaluations]
    there += run_dir.evaluations.glob("step_*")
    there += [*logs.glob("attempt_*/events*.jsonl"), *logs.glob("attempt_*/timeline_*.jsonl")]
    for path in sorted(there):
        try:
            status = path.stat()
        except OSError:  # it is not there yet, or no more; what cannot be read, the page says
            continue
        yield str(path), status.st_size, status.st_mtime_ns


_HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HTML = "text/html; charset=utf-8"


@contextmanager
def listening_for_browsers(config: DashboardConfig | None) -> Iterator[Listener | None]:
    """Listen where the settings say; they may say nowhere.

    Raises:
        ConfigError: the port is taken, or what draws is not installed.
    """
    if config is None:
        yield None
        return

    remedy = "Choose with --dashboard.port a port from 1024 on, or 0 for any free one."
    with listening(_HOST, config.port, section="dashboard", remedy=remedy) as listener:
        yield listener


class Dashboard:
    """Serves one run, if there is a listener, over all attempts of a launcher; a context manager."""

    def __init__(self, listener: Listener | None, run_dir: RunDir) -> None:
        self._listener = listener
        self._run_id = run_dir.run_id() if listener is not None else ""
        self._trouble: list[str] = []
        self._told: set[str] = set()
        self._builds = Builds(run_dir, self._tell)
        self._server: WebServer | None = None

    def __enter__(self) -> Dashboard:
        if self._listener is not None:
            self._builds.__enter__()
            self._server = WebServer(
                self._listener, name="dashboard", answer=self._answer, tell=self._tell, headers=_HEADERS
            )
            print(f"Dashboard: http://{self._listener.address}/", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.end()
            self._builds.__exit__()

    def look(self, say: Callable[[str], None]) -> None:
        """Say what went wrong since the last call."""
        while self._trouble:
            say(f"WARNING: dashboard: {self._trouble.pop(0)}")

    def _tell(self, trouble: str) -> None:
        if trouble not in self._told:
            self._told.add(trouble)
            self._trouble.append(trouble)

    def _answer(self, path: str, _: Message) -> Response:
        if path not in ("/", "/state", "/update"):
            return Response(404, b"there is the page of the run at /, and nothing else\n")
        self._builds.ask()
        built, trouble = self._builds.built, self._builds.trouble
        if path == "/state":
            state = {"run": self._run_id, "tag": built.tag if built is not None else None, "trouble": trouble}
            return Response(200, msgspec.json.encode(state), "application/json")
        if built is not None:
            return Response(200, built.page if path == "/" else built.update, _HTML)
        if trouble is not None:
            return _waiting(500, f"The page could not be made: {trouble}", "It is tried again.")
        return _waiting(503, "The page is being made.", "This takes seconds, and more where training needs all cores.")


def _waiting(status: int, *lines: str) -> Response:
    """Return a page that asks again by itself."""
    said = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="color-scheme" content="light dark"><meta http-equiv="refresh" content="2">
<link rel="icon" href="data:,"><title>holdfast</title>
</head>
<body>{said}</body>
</html>
"""
    return Response(status, page.encode(), _HTML)
