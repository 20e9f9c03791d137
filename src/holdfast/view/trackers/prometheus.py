"""Serves the metrics of a run to Prometheus: reads the run's files at each scrape.

The endpoint listens before anything of the run starts, so the launcher reports a taken port at once. It stays for as
long as the launcher lives, through all attempts. What it shows is in `scrape`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from holdfast.config.view import PrometheusConfig
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir
from holdfast.view.web import Listener, Response, WebServer, listening

if TYPE_CHECKING:
    from holdfast.view.trackers.scrape import RunCollector

_ROUTE = "/metrics"
_LOOK_S = 1.0


@contextmanager
def listening_for_prometheus(config: PrometheusConfig | None) -> Iterator[Listener | None]:
    """Listen where the settings say; they may say nowhere.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    if config is None:
        yield None
        return
    remedy = (
        "Choose with --prometheus.host an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all; with "
        "--prometheus.port a port from 1024 on, or 0 for any free one."
    )
    with listening(config.host, config.port, section="prometheus", remedy=remedy) as listener:
        yield listener


class PrometheusServer:
    """Serves one run, if there is a listener; a context manager.

    Args:
        program: that is run, such as `sft`.
        leads: this launcher is the only one of the run, or that of the node that leads.
    """

    def __init__(self, listener: Listener | None, run_dir: RunDir, program: str, *, leads: bool = True) -> None:
        self._listener = listener
        self._leads = leads
        self._run_dir = run_dir
        self._collector: RunCollector | None = None
        self._server: WebServer | None = None
        self._looked = time.monotonic()
        if listener is not None:
            from holdfast.view.trackers.scrape import RunCollector  # only here, for what it imports

            self._collector = RunCollector(run_dir, program)
            self._server = WebServer(
                listener, name="prometheus", answer=self._answer, tell=self._collector.tell, between=self._look_around
            )

    def __enter__(self) -> PrometheusServer:
        if self._listener is None and self._leads:
            _remove_targets(self._run_dir)  # a killed launcher's
        if self._listener is not None:
            print(f"Prometheus: http://{self._listener.address}{_ROUTE}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.end()
            _remove_targets(self._run_dir)

    def begin(self, attempt: int, *, max_steps: int, engines: Mapping[str, str]) -> None:
        """Serve another attempt.

        Args:
            engines: names and base URLs of the inference servers that it has started.
        """
        if self._collector is None or self._listener is None:
            return
        self._collector.attempt, self._collector.max_steps = attempt, max_steps
        targets: list[dict[str, Any]] = [{"targets": [self._listener.address], "labels": {}}]
        targets += [_target(url, {**self._collector.run, "process": name}) for name, url in engines.items()]
        try:
            atomic.write_file(self._run_dir.prometheus, json.dumps(targets, indent=1).encode())
        except OSError as error:
            self._collector.tell(f"{self._run_dir.prometheus} is not written: {error}")

    def _answer(self, path: str, headers: Message) -> Response:
        from prometheus_client.exposition import choose_encoder

        assert self._collector is not None
        if path != _ROUTE:
            return Response(404, f"there is {_ROUTE} here, and nothing else\n".encode())
        encode, kind = choose_encoder(headers.get("Accept", ""))
        return Response(200, encode(self._collector), kind)

    def _look_around(self) -> None:
        """Look at the run now and then, whether somebody asks or not."""
        assert self._collector is not None
        if time.monotonic() - self._looked >= _LOOK_S:
            try:
                self._collector.look()
            except Exception as error:  # noqa: BLE001 - or nobody would be answered any more
                self._collector.tell(f"the run is not seen: {type(error).__name__}: {error}")
            self._looked = time.monotonic()

    def look(self, processes: Mapping[str, bool], say: Callable[[str], None]) -> None:
        """Take which processes live, and say what went wrong since the last call."""
        if self._collector is None:
            return
        self._collector.processes = processes
        while self._collector.trouble:
            say(f"WARNING: prometheus: {self._collector.trouble.pop(0)}")


def _target(url: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return an entry of `prometheus.json` for the `/metrics` of an inference server."""
    parts = urlsplit(url)
    place = {"__scheme__": parts.scheme, "__metrics_path__": f"{parts.path.rstrip('/')}{_ROUTE}"}
    return {"targets": [parts.netloc], "labels": {**labels, **place}}


def _remove_targets(run_dir: RunDir) -> None:
    """Lead Prometheus nowhere any more."""
    try:
        run_dir.prometheus.unlink(missing_ok=True)
    except OSError as error:
        print(f"WARNING: {os.fspath(run_dir.prometheus)} stays: {error}", flush=True)
