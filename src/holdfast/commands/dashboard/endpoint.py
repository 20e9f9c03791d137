"""What one launcher answers to the browsers that look at its run.

`/` is the page that `report` makes, with a line that says that it is live, and a script that looks at `/state` and
takes what is new from `/update`. There is nothing else: no path leads to a file.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message

import msgspec

from holdfast.commands.dashboard.builds import Builds
from holdfast.commands.web import Answer, Listener, WebServer, listening
from holdfast.shared.config.dashboard import DashboardConfig
from holdfast.shared.files.run_dir import RunDir

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
    from holdfast.orchestrator.environments.extras import import_extra

    import_extra("plotly", extra="report", needed_by="--dashboard")
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

    def _answer(self, path: str, _: Message) -> Answer:
        if path not in ("/", "/state", "/update"):
            return Answer(404, b"there is the page of the run at /, and nothing else\n")
        self._builds.ask()
        built, trouble = self._builds.built, self._builds.trouble
        if path == "/state":
            state = {"run": self._run_id, "tag": built.tag if built is not None else None, "trouble": trouble}
            return Answer(200, msgspec.json.encode(state), "application/json")
        if built is not None:
            return Answer(200, built.page if path == "/" else built.update, _HTML)
        if trouble is not None:
            return _waiting(500, f"The page could not be made: {trouble}", "It is tried again.")
        return _waiting(503, "The page is being made.", "This takes seconds, and more where training needs all cores.")


def _waiting(status: int, *lines: str) -> Answer:
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
    return Answer(status, page.encode(), _HTML)
