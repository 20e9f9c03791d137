"""Starting child processes, waiting for what happens to them, and stopping them without orphans.

The launcher waits until a child ends, a signal comes, or it is time to refresh the console. Children ask the kernel to
kill them if the launcher dies.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.launcher.cluster import channels
from holdfast.launcher.cluster.hosts import THIS_MACHINE, Host, Process
from holdfast.process.child import is_ignored
from holdfast.process.scratch import remove_abandoned

REFRESH_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOP_TIMEOUT_S = 10.0
ECHO_S = 1.0
"""A signal so soon after another is the same one: a signal to a process group arrives twice, by `uv run` as well."""


@dataclass
class Child:
    """One process of a run.

    Attributes:
        name: `trainer`, `orchestrator`, `inference`; several servers are `inference_0` and so on.
        log: file with its stdout and stderr, after its predecessors' output.
        log_begin: where its own output begins.
        is_service: it runs until it is stopped; exit code 0 is a failure, too.
        has_done_its_work: whether exit code 0 is right, asked after it ended.
    """

    name: str
    process: Process
    log: Path
    is_service: bool
    argv: list[str]
    environment: dict[str, str]
    has_done_its_work: Callable[[], bool] = lambda: True
    log_begin: int = 0
    host: Host = THIS_MACHINE
    _is_finished: bool = False

    @property
    def error(self) -> str | None:
        """The last error that it reported, if any."""
        return error_message(self.log, begin=self.log_begin)

    @property
    def has_failed(self) -> bool:
        """Whether it ended without having done its work."""
        return self.process.poll() is not None and not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether it did its work and ended."""
        if not self._is_finished and self.process.poll() == 0 and not self.is_service:
            self._is_finished = self.has_done_its_work()  # the proof may be gone later
        return self._is_finished


class Supervisor:
    """Owns the children of one attempt."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        # A signal makes it readable: select then wakes at once (the self-pipe trick).
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._signal: int | None = None
        self._taken: int | None = None
        self._taken_at = -math.inf

    def __enter__(self) -> Supervisor:
        signal.set_wakeup_fd(self._sender.fileno())
        for number in STOP_SIGNALS:
            if not is_ignored(number):
                signal.signal(number, self._note_signal)
        # Only signals with a handler write to the wakeup descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        remove_abandoned()  # left by killed processes
        signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()

    def _note_signal(self, number: int, _: object) -> None:
        # A deadline counts even right after Ctrl-C, which has none.
        if time.monotonic() - self._taken_at > ECHO_S or (self._taken == signal.SIGINT != number):
            self._signal = number

    def start(
        self,
        name: str,
        argv: list[str],
        log: Path,
        *,
        environment: dict[str, str],
        is_service: bool = False,
        has_done_its_work: Callable[[], bool] = lambda: True,
        host: Host = THIS_MACHINE,
    ) -> Child:
        """Start one child with its output in `log`; it replaces a dead one of that name."""
        for dead in [child for child in self.children if child.name == name]:
            # Before the new one starts: it needs the port, the memory, and the end of the log.
            dead.process.clear(STOP_TIMEOUT_S)
            self.children.remove(dead)
        begin = log.stat().st_size if log.exists() else 0
        process = host.start(argv, log, environment)
        child = Child(name, process, log, is_service, argv, environment, has_done_its_work, begin, host)
        self.children.append(child)
        return child

    def run(self, refresh: Callable[[], None]) -> Child | int | None:
        """Wait until the run is over.

        Returns:
            None if every child that is not a service did its work; the child that failed first; or the number of the
            signal that asked the launcher to stop.
        """
        while True:
            refresh()
            # Before deaths: a scheduler may signal the children as well.
            if (number := self.take_signal()) is not None:
                return number
            # Before deaths, too: nobody needs a service any more.
            if all(child.is_finished for child in self.children if not child.is_service):
                return None
            failed = [child for child in self.children if child.has_failed]
            if failed:
                return failed[0]
            self._wait_for_signal(REFRESH_S)  # no longer: new lines of metrics are not signals

    def restart(self, child: Child) -> Child:
        """Start a dead child again, as it was started."""
        return self.start(
            child.name,
            child.argv,
            child.log,
            environment=child.environment,
            is_service=child.is_service,
            has_done_its_work=child.has_done_its_work,
            host=child.host,
        )

    def give_up(self, child: Child) -> None:
        """Forget a dead child."""
        child.process.clear(STOP_TIMEOUT_S)
        self.children.remove(child)

    def take_for_signaled(self, number: int) -> None:
        """Act as if signal `number` had come."""
        self._signal = number

    def pause(self, seconds: float, refresh: Callable[[], None]) -> int | None:
        """Wait; return the number of a signal that came."""
        deadline = time.monotonic() + seconds
        while self._signal is None and (left := deadline - time.monotonic()) > 0:
            refresh()
            self._wait_for_signal(min(left, REFRESH_S))
        return self.take_signal()

    def ask_to_end(self, child: Child, number: int, refresh: Callable[[], None], *, timeout_s: float) -> bool:
        """Pass a signal on to the trainer and wait for its end; return whether it came within `timeout_s`.

        SIGUSR1 arrives as itself, SIGINT as SIGUSR2, and any other signal as SIGTERM. A new signal to the launcher ends
        the wait."""
        if child.process.poll() is None:
            passed_on = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGINT: signal.SIGUSR2}
            child.process.signal(passed_on.get(signal.Signals(number), signal.SIGTERM))
        deadline = time.monotonic() + timeout_s
        while child.process.poll() is None:
            if self._signal is not None or time.monotonic() > deadline:
                return False
            refresh()
            self._wait_for_signal(REFRESH_S)
        refresh()
        return True

    def take_signal(self) -> int | None:
        """Return the signal that came, once."""
        number, self._signal = self._signal, None
        if number is not None:
            self._taken, self._taken_at = number, time.monotonic()
        return number

    def _wait_for_signal(self, timeout_s: float) -> None:
        """Wait for any signal, such as the signal of a child that ended."""
        select.select([self._receiver], [], [], timeout_s)
        with suppress(BlockingIOError):
            while self._receiver.recv(4096):
                continue

    def stop(self, timeout_s: float = STOP_TIMEOUT_S, *, names: Collection[str] | None = None) -> None:
        """Ask all children, or children of these names, to end; wait up to `timeout_s`, then kill the rest."""
        asked = [child for child in self.children if names is None or child.name in names]
        for child in asked:
            with suppress(OSError, HoldfastError):  # it could not be started
                child.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for child in asked:
            with suppress(OSError, HoldfastError):
                if child.process.wait(max(0.0, deadline - time.monotonic())) is None:
                    child.process.kill()
                    # For as long as a host may be mute: then it is lost, and the child does not count as running.
                    child.process.wait(channels.CALL_TIMEOUT_S + STOP_TIMEOUT_S)
        for child in asked:
            # A dead child may have left its children (ranks, an engine) in its session.
            child.process.kill()


_MOST_BYTES = 16 << 20  # of a log, which may be longer than the memory


def end_of_log(path: Path, *, begin: int = 0) -> list[str]:
    """Return the lines of a log after `begin` bytes, or of its end if they are many; none without a log, and why if it
    cannot be read: no run ends because of that."""
    try:
        with path.open("rb") as log:
            log.seek(max(begin, log.seek(0, os.SEEK_END) - _MOST_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def last_lines(path: Path, count: int = 15) -> str:
    """Return the last lines of a log, indented."""
    return "\n".join(f"    {line}" for line in end_of_log(path)[-count:])


def error_message(path: Path, *, begin: int = 0) -> str | None:
    """Return the message of the last `error:` block in a log, if any. `begin`: bytes that others wrote before."""
    lines = end_of_log(path, begin=begin)
    # Only the last lines: logs may be long.
    for number in range(len(lines) - 1, max(-1, len(lines) - 50), -1):
        if lines[number].startswith("error: "):
            block = [lines[number].removeprefix("error: ")]
            for line in lines[number + 1 :]:
                if not line.startswith("       "):
                    break
                block.append(line)
            return "\n".join(block)
    return None
