"""The launcher's end of its connections to agents: one line of JSON for each call and answer.

`PipeChannel` connects to a command such as `srun`. A `SocketChannel` is of an agent that has connected to a `Listener`.
"""

import errno
import json
import math
import queue
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from holdfast.errors import ConfigError
from holdfast.process.heartbeat import awake_s

CALL_TIMEOUT_S = 60.0
"""For one answer; the first one waits for a scheduler and the imports of the agent."""
SILENT_S = 30.0
"""An agent or launcher that sends nothing through its socket for so long is lost."""
PERIOD_S = 1.0
_CLOSE_TIMEOUT_S = 10.0
_GREETING_S, _PAUSE_S = 5.0, 0.2
_MOST_BYTES = 1 << 20
"""The longest first line of an agent."""


class HostLost(Exception):
    """An agent is out of reach: what it started is dead, or will be soon."""


class LineChannel:
    """The connection to an agent that speaks lines of JSON. Only `call` and `close` wait for the agent. `signal`: that
    came to the agent, and asks the run to stop; None: none came."""

    silent_s, period_s = math.inf, None
    """An agent that says nothing for so long is lost; and how often both sides send an empty line, if they do."""

    def __init__(self, reader: IO[str], writer: IO[str]) -> None:
        self.signal: int | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], float]] = deque()  # and by when an answer is due
        self._heard_s = awake_s()
        self._started: Future[int] | None = None
        self._ends: dict[int, int] = {}
        self._lost: HostLost | None = None
        threading.Thread(target=self._write, args=(writer,), daemon=True).start()
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()

    def close(self) -> None:
        """End the agent and its process."""
        raise NotImplementedError

    def _why_ended(self) -> str:
        """Return why the agent sends nothing more."""
        raise NotImplementedError

    def _has_written(self) -> None:
        """Called when the last line is sent."""

    def call(self, method: str, *arguments: Any) -> Any:
        answer = self.post(method, *arguments)
        try:
            return answer.result(CALL_TIMEOUT_S)
        except TimeoutError:
            if answer.done():  # the agent's own error, or just come
                return answer.result()
            raise self.lose() from None

    def post(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if method == "start":
                self._started = answer
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            self._calls.append((answer, awake_s() + CALL_TIMEOUT_S))
            self._lines.put(f"{json.dumps({'method': method, 'arguments': arguments})}\n")
        return answer

    def ended(self) -> int | None:
        assert self._started is not None
        if self._started.done() and (code := self._ends.get(self._started.result())) is not None:
            return code
        if self.is_lost:
            assert self._lost is not None
            raise self._lost
        return None

    @property
    def is_lost(self) -> bool:
        """Whether the agent is out of reach."""
        if self._lost is None:
            with self._lock:
                is_late = bool(self._calls) and awake_s() > self._calls[0][1]
            if is_late or awake_s() - self._heard_s > self.silent_s:
                self.lose()
        return self._lost is not None

    def lose(self) -> HostLost:
        """Give the agent up: a late answer would be taken for the answer of a later call."""
        threading.Thread(target=self.close, daemon=True).start()
        return self._lose("it does not answer")

    def _lose(self, reason: str) -> HostLost:
        with self._lock:
            self._lost = lost = self._lost or HostLost(reason)
            calls, self._calls = self._calls, deque()
        for answer, _ in calls:
            answer.set_exception(lost)
        return lost

    def _write(self, writer: IO[str]) -> None:
        # In a thread: an agent may read nothing.
        with suppress(OSError), writer:
            while True:
                try:
                    line = self._lines.get(timeout=self.period_s)
                except queue.Empty:
                    line = "\n"
                if line is None:
                    break
                writer.write(line)
                writer.flush()
        self._has_written()

    def _read(self, reader: IO[str]) -> None:
        with suppress(OSError, ValueError, RecursionError), reader:
            for line in reader:
                self._heard_s = awake_s()
                if line != "\n":
                    self._take(json.loads(line))
        self._lose(self._why_ended())

    def _take(self, message: dict[str, Any]) -> None:
        kinds = ({"ended", "pid"}, {"signal"}, {"error"}, {"result"})
        if not isinstance(message, dict) or not any(kind <= message.keys() for kind in kinds):
            raise ValueError("not a message of an agent")
        if "ended" in message:
            self._ends[message["pid"]] = message["ended"]
            return
        if "signal" in message:
            self.signal = message["signal"]
            return
        with self._lock:
            if not self._calls:
                return
            answer, _ = self._calls.popleft()
        if answer is self._started:  # its id may be an earlier process's
            self._ends.clear()
        if "error" in message:
            number, said = message.get("errno"), message["error"]
            answer.set_exception(ConfigError(said) if number is None else OSError(number, said))
        else:
            answer.set_result(message["result"])


class PipeChannel(LineChannel):
    """The connection to an agent that `argv` starts."""

    def __init__(self, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__(self._process.stdout, self._process.stdin)

    def close(self) -> None:
        # By the end of its stdin: a killed `srun` would not end it.
        self._lines.put(None)
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _why_ended(self) -> str:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            errors = [line for line in stderr if "error" in line]
        return errors[0].strip() if errors else f"its connection has ended (exit code {self._process.wait()})"


class SocketChannel(LineChannel):
    """The connection to an agent that has connected to this machine."""

    silent_s, period_s = SILENT_S, PERIOD_S

    def __init__(self, connection: socket.socket, reader: IO[str]) -> None:
        self._connection = connection
        self._has_closed = threading.Event()
        super().__init__(reader, connection.makefile("w", encoding="utf-8"))

    def tell(self, line: str) -> None:
        """Send a line that is not a call."""
        self._lines.put(f"{line}\n")

    def close(self) -> None:
        self._lines.put(None)
        self._has_closed.wait(_CLOSE_TIMEOUT_S if self._lost is None else 0.0)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _has_written(self) -> None:
        with suppress(OSError):  # the agent sees the end of its lines
            self._connection.shutdown(socket.SHUT_WR)

    def _why_ended(self) -> str:
        self._has_closed.set()
        return "its connection has ended"


class Listener:
    """Hands each agent that connects to `welcome`, with its first line; a thread for each."""

    def __init__(self, server: socket.socket, welcome: Callable[[SocketChannel, str], object]) -> None:
        self._server, self._welcome = server, welcome
        self.port: int = server.getsockname()[1]
        threading.Thread(target=self._accept, name="agents", daemon=True).start()

    def close(self) -> None:
        """Take no more agents."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):  # closed
                    return
                time.sleep(_PAUSE_S)  # such as too many open files
                continue
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        reader = connection.makefile("r", encoding="utf-8")
        try:
            connection.settimeout(_GREETING_S)
            greeting = reader.readline(_MOST_BYTES)
            connection.settimeout(None)
        except (OSError, ValueError):
            connection.close()
            return
        self._welcome(SocketChannel(connection, reader), greeting)


def listen(port: int = 0) -> socket.socket:
    """Return a socket that listens at all addresses of this machine; 0: at any free port. Raise OSError if taken."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def close_all(channels: Iterable[LineChannel]) -> None:
    """End all agents at once, as a mute one takes its time."""
    threads = [threading.Thread(target=channel.close) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
