"""The endpoint of one launcher: `/metrics` for Prometheus, and the file that leads Prometheus to it.

It listens before anything of the run starts, so a port that is taken is told at once, and for as long as the launcher
lives, through all attempts. Requests are answered by threads of their own, a few at a time.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from holdfast.shared.config.prometheus import PrometheusConfig
from holdfast.shared.config.urls import is_loopback, names_this_machine
from holdfast.shared.errors import ConfigError
from holdfast.shared.files import durable
from holdfast.shared.files.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.commands.prometheus.collector import RunCollector

_ROUTE = "/metrics"
_AT_ONCE = 8
"""Requests; more are turned away: who opens connections and says nothing takes no more of the launcher than this."""
_CLIENT_TIMEOUT_S = 10.0
_POLL_S = 0.2
_LOOK_S = 1.0


@dataclass
class Listener:
    """A port that this launcher listens at.

    Attributes:
        host: as it was given.
    """

    host: str
    port: int
    socket: socket.socket

    @property
    def address(self) -> str:
        """`HOST:PORT` where Prometheus finds it: of every address of this machine, its name."""
        return _joined(socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host, self.port)


@contextmanager
def listening(config: PrometheusConfig | None) -> Iterator[Listener | None]:
    """Listen where the settings say; they may say nowhere.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    if config is None:
        yield None
        return
    try:
        listener = _listen(config)
    except (OSError, UnicodeError) as error:  # the latter of what is no name of a host
        raise ConfigError(_refusal(config, error)) from None
    with listener.socket:
        yield listener


def _listen(config: PrometheusConfig) -> Listener:
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    opened = socket.socket(family, kind, protocol)
    try:
        # Connections of a launcher that ended a moment ago do not matter, one that listens does.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(_AT_ONCE)
    except OSError:
        opened.close()
        raise
    return Listener(config.host, opened.getsockname()[1], opened)


def _refusal(config: PrometheusConfig, error: OSError | UnicodeError) -> str:
    where = _joined(config.host, config.port)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"prometheus: {where} is in use, perhaps by another run. Give each run of this machine its own with "
            "--prometheus.port, or 0 for any free one."
        )
    return (
        f"prometheus: {where} cannot be listened at: {getattr(error, 'strerror', None) or error}. Choose with "
        "--prometheus.host an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all; with --prometheus.port a "
        "port from 1024 on, or 0 for any free one."
    )


class Endpoint:
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
        self._server: _Server | None = None
        if listener is not None:
            from holdfast.commands.prometheus.collector import RunCollector

            self._collector = RunCollector(run_dir, program)
            self._server = _Server(listener, self._collector)

    def __enter__(self) -> Endpoint:
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
            durable.write_file(self._run_dir.prometheus, json.dumps(targets, indent=1).encode())
        except OSError as error:
            self._collector.tell(f"{self._run_dir.prometheus} is not written: {error}")

    def look(self, processes: Mapping[str, bool], say: Callable[[str], None]) -> None:
        """Take which processes live, and say what went wrong since the last call."""
        if self._collector is None:
            return
        self._collector.processes = processes
        while self._collector.trouble:
            say(f"WARNING: prometheus: {self._collector.trouble.pop(0)}")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: Listener, collector: RunCollector) -> None:
        super().__init__((listener.host, listener.port), _Handler, bind_and_activate=False)
        self.socket.close()  # one of its own
        self.socket = listener.socket
        self.collector = collector
        self.is_local = is_loopback(listener.host)
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="prometheus", daemon=True)
        self._thread.start()

    def service_actions(self) -> None:
        """Look at the run now and then; called between requests."""
        if time.monotonic() - self._looked >= _LOOK_S:
            try:
                self.collector.look()
            except Exception as error:  # noqa: BLE001 - or nobody would be answered any more
                self.collector.tell(f"the run is not seen: {type(error).__name__}: {error}")
            self._looked = time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what is no client that went away in the middle of an answer: that is its own affair."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.collector.tell(f"a request was not answered: {type(error).__name__}: {error}")

    def end(self) -> None:
        """Answer no more."""
        self.shutdown()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride] - whose handler it is
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer one request."""
        if self.server.is_local and not names_this_machine(self.headers.get("Host", "")):
            # A page of a browser may give its own name the address 127.0.0.1.
            self._answer(403, b"this is for this machine alone: address it as 127.0.0.1, ::1 or localhost\n")
            return
        if urlsplit(self.path).path != _ROUTE:
            self._answer(404, f"there is {_ROUTE} here, and nothing else\n".encode())
            return
        from prometheus_client.exposition import choose_encoder

        try:
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            body = encode(self.server.collector)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on; said once
            self.server.collector.tell(f"nothing is served: {type(error).__name__}: {error}")
            self._answer(500, b"see the console of the run\n")
            return
        self._answer(200, body, kind)

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the console for the run."""


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


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
