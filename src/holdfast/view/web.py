"""A small web server in the launcher: it listens before anything of a run starts, and must not harm the run.

A port that is taken is told at once. Requests are answered by threads of their own, a few at a time, none of which
waits long for a client.
"""

from __future__ import annotations

import errno
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from holdfast.config.base import is_loopback, names_this_machine
from holdfast.errors import ConfigError

_AT_ONCE = 8
"""Requests; more are turned away: who opens connections and says nothing takes no more of the launcher than this."""
_CLIENT_TIMEOUT_S = 10.0
_POLL_S = 0.2
_PIECE_BYTES = 2**16
"""What a client must take within its time: a page may be long, and the way to its reader slow."""


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
        """`HOST:PORT` where others find it: of every address of this machine, its name."""
        return _joined(socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host, self.port)


@contextmanager
def listening(host: str, port: int, *, section: str, remedy: str) -> Iterator[Listener]:
    """Listen at an address of this machine.

    Args:
        port: 0: any free one.
        section: of the settings that say so.
        remedy: what to set where one cannot listen there.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    try:
        listener = _listen(host, port)
    except (OSError, UnicodeError) as error:  # the latter of what is no name of a host
        where = f"{section}: {_joined(host, port)}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{where} is in use, perhaps by another run. Give each run of this machine its own with "
                f"--{section}.port, or 0 for any free one."
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} cannot be listened at: {reason}. {remedy}") from None
    with listener.socket:
        yield listener


def _listen(host: str, port: int) -> Listener:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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
    return Listener(host, opened.getsockname()[1], opened)


@dataclass(frozen=True)
class Response:
    """What a request gets."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


class WebServer(socketserver.ThreadingTCPServer):
    """Answers at a listener until `end`, in threads.

    Args:
        name: of the thread that listens.
        answer: gives what is at a path, or raises; the headers of the request are its second argument.
        tell: takes what went wrong, which is no fault of a client.
        headers: of every answer.
        between: called a few times in a second, between requests.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listener: Listener,
        *,
        name: str,
        answer: Callable[[str, Message], Response],
        tell: Callable[[str], None],
        headers: Mapping[str, str] | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__((listener.host, listener.port), _Handler, bind_and_activate=False)
        self.socket.close()  # one of its own
        self.socket = listener.socket
        self.is_local = is_loopback(listener.host)
        self.answer, self.headers = answer, headers or {}
        self.tell, self._between = tell, between
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name=name, daemon=True)
        self._thread.start()

    def service_actions(self) -> None:
        """Do what is to be done between requests."""
        self._between()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there is one left."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and leave the thread to the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what is no client that went away in the middle of an answer: that is its own affair."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.tell(f"a request was not answered: {type(error).__name__}: {error}")

    def end(self) -> None:
        """Answer no more."""
        self.shutdown()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: WebServer  # pyright: ignore[reportIncompatibleVariableOverride] - whose handler it is
    timeout = _CLIENT_TIMEOUT_S
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        """Answer one request."""
        if self.server.is_local and not names_this_machine(self.headers.get("Host", "")):
            # A page of a browser may give its own name the address 127.0.0.1.
            refusal = b"this is for this machine alone: address it as 127.0.0.1, ::1 or localhost\n"
            self.send(Response(403, refusal))
            return
        try:
            found = self.server.answer(_path_of(self.path), self.headers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on; said once
            self.server.tell(f"nothing is served: {type(error).__name__}: {error}")
            found = Response(500, b"see the console of the run\n")
        self.send(found)

    do_HEAD = do_GET

    def send(self, answer: Response) -> None:
        """Send an answer; of one to HEAD, what stands above it."""
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = memoryview(answer.body)
        for begin in range(0, len(body), _PIECE_BYTES):
            self.wfile.write(body[begin : begin + _PIECE_BYTES])

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the console for the run."""


def _path_of(target: str) -> str:
    try:
        return urlsplit(target).path
    except ValueError:  # brackets without an end
        return ""


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
