"""Processes on this machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from holdfast.shared.process.child import LAUNCHER_ENV
from holdfast.shared.process.stacks import show_stacks


class LocalProcess:
    """A child of this process, in a session of its own."""

    loss = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Of the process and its group."""
        return self._process.pid

    @property
    def returncode(self) -> int | Any:
        """As `subprocess` says it."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return how it ended, without waiting."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Send a signal to it alone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def clear(self, timeout_s: float) -> None:
        """Kill its group and wait until all of it is gone."""
        self.kill()
        self._process.wait()
        deadline = time.monotonic() + timeout_s
        for pid in psutil.pids():
            try:
                if os.getpgid(pid) != self.pid:
                    continue
                # Not waitpid: they are no children of ours. A descriptor is not fooled by a reused id.
                descriptor = os.pidfd_open(pid)
            except (ProcessLookupError, PermissionError):
                continue
            try:
                # A large process takes seconds to die, and holds port and memory until then.
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)

    def show_stacks(self, pids: Iterable[int], log: Path) -> None:
        """Have its processes write their stacks into `log`."""
        show_stacks(pids, of=self.pid, log=log)


class LocalHost:
    """This machine."""

    name = "this machine"

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> LocalProcess:
        """Start a child in a session of its own."""
        return start_here(argv, log, {**os.environ, **environment})


def start_here(argv: list[str], log: Path, environment: Mapping[str, str]) -> LocalProcess:
    """Start a child in a session of its own, with `environment` alone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,  # nothing that a user types is for a child
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, LAUNCHER_ENV: str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops them in order
        )
    return LocalProcess(process)


THIS_MACHINE = LocalHost()
