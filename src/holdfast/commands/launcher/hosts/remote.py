"""Processes on other hosts, as the launcher sees them: each through a `Place` there, whatever leads to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from holdfast.commands.launcher.hosts.place import travelling

_POLL_S = 0.02
_LOST = -signal.SIGKILL


class HostLost(Exception):
    """Nothing is heard of a place any more: what ran there is dead, or is about to be."""


class Wire(Protocol):
    """What leads to one `Place`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the place; return its result.

        Raises:
            HostLost: there is no answer, and will be none.
            HoldfastError: what the method raised.
        """
        ...

    def ended(self) -> int | None:
        """Return how the process there ended, without waiting; None while it runs.

        Raises:
            HostLost: nobody will ever know.
        """
        ...


class RemoteProcess:
    """A process on another host."""

    def __init__(self, wire: Wire, *, host: str, pid: int) -> None:
        self.pid = pid
        self.loss: str | None = None
        self.returncode: Any = None
        self._wire = wire
        self._host = host

    def poll(self) -> int | None:
        """Return how it ended, without waiting; a lost host counts as SIGKILL."""
        if self.returncode is None:
            try:
                self.returncode = self._wire.ended()
            except HostLost as lost:
                self._lose(lost)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end, at most so long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_POLL_S)  # neither Ray nor a pipe wakes who waits for a signal as well
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to it alone."""
        if self.poll() is None:
            self._call("signal", int(number))

    def kill(self) -> None:
        """Kill it and what it started."""
        self._call("kill")

    def clear(self, timeout_s: float) -> None:
        """Kill it and what it started, and wait until they are gone."""
        self._call("clear", timeout_s)
        self.wait(timeout_s)

    def show_stacks(self, pids: Iterable[int], log: Path) -> None:
        """Have its processes write their stacks into `log`."""
        self._call("show_stacks", list(pids), str(log))

    def _call(self, method: str, *arguments: Any) -> None:
        if self.loss is not None:
            return
        try:
            self._wire.call(method, *arguments)
        except HostLost as lost:
            self._lose(lost)

    def _lose(self, lost: HostLost) -> None:
        self.loss = f"{self._host} is lost: {lost}"
        if self.returncode is None:
            self.returncode = int(_LOST)


class RemoteHost:
    """A host on which one process of the run has its place.

    Args:
        address: where other hosts reach it.
    """

    def __init__(self, name: str, address: str, wire: Wire) -> None:
        self.name = name
        self.address = address
        self.wire = wire

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> RemoteProcess:
        """Start a process of ours there; `argv` is that of `module_command`."""
        arguments = (argv[3:], str(log.absolute()), {**travelling(dict(os.environ)), **environment}, str(Path.cwd()))
        try:
            pid = self.wire.call("start", *arguments)
        except HostLost as lost:
            process = RemoteProcess(self.wire, host=self.name, pid=0)
            process._lose(lost)
            return process
        return RemoteProcess(self.wire, host=self.name, pid=pid)
