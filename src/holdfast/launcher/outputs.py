"""Processes beside a run: one for each tracker, and one that serves the live page.

A side process may die, hang or be slow without any effect on training.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.training import TrainingCommand
from holdfast.errors import ConfigError
from holdfast.launcher.cluster.hosts import THIS_MACHINE, Process
from holdfast.launcher.plan import Plan, Restarts
from holdfast.launcher.preflight import check_in_child
from holdfast.launcher.supervise import error_message
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.process.heartbeat import HEARTBEAT_ENV
from holdfast.process.imports import module_command
from holdfast.view.sending import label_of
from holdfast.view.tracker import BUILT_IN, check_tracker

_MAX_RESTARTS, _WINDOW_S = 3, 600.0
_STOPPING_S = 10.0


def check_outputs(config: TrainingCommand) -> None:
    """Check that the trackers of the settings are installed, and that the port of the live page is free.

    Raises:
        ConfigError: naming the remedy.
    """
    backends = config.tracking.backends if config.tracking is not None else []
    for name in backends:
        if name in BUILT_IN:
            check_tracker(name, key="tracking.backends")
    if config.tracking is not None and any(name not in BUILT_IN for name in backends):
        check_in_child("holdfast.view.track", config.tracking)
    if config.dashboard is None or config.parallel.nodes > 1:  # only the head node serves
        return
    try:
        socket.create_server(("127.0.0.1", config.dashboard.port)).close()
    except OSError as error:
        raise ConfigError(
            f"dashboard: 127.0.0.1:{config.dashboard.port} cannot be used: {error.strerror}. Give each run of this "
            "machine its own port from 1024 on with --dashboard.port, or 0 for any free one."
        ) from None


@contextmanager
def held_back(number: signal.Signals) -> Iterator[None]:
    """Block a signal in what is started meanwhile: it may come before the process has a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _SideProcess:
    """A tracker or `dashboard`, and the command that does its work later; `process` is None if it does not run.

    Attributes:
        starts_at: when it is started, in monotonic seconds; None: not again.
    """

    name: str
    argv: list[str]
    remedy: str
    log: Path
    process: Process | None = None
    starts_at: float | None = 0.0


class SideProcesses:
    """The side processes of one launcher, over all attempts; a context manager, which ends them."""

    def __init__(self, plan: Plan) -> None:
        run, config = plan.attempt.run_dir.path, plan.trainer
        self._logs = plan.attempt.run_dir.logs(plan.attempt.number)
        self._restarts = Restarts(_MAX_RESTARTS, _WINDOW_S)
        self._waits_s = config.tracking.finish_timeout_s if config.tracking else _STOPPING_S
        self._processes: list[_SideProcess] = []
        if plan.node:
            return
        if config.tracking is not None:
            settings = config.tracking.model_dump_json()
            for name in config.tracking.backends:
                argv = module_command("holdfast.view.track", str(run), name, settings)
                remedy = f"`track {run} --to {name}` sends what is missing."
                log = self._logs / f"tracking_{label_of(name)}.log"
                self._processes.append(_SideProcess(name, argv, remedy, log))
        if config.dashboard is not None:
            argv = module_command("holdfast.view.serve", str(run), str(config.dashboard.port))
            remedy = f"`report {run}` makes the page."
            self._processes.append(_SideProcess("dashboard", argv, remedy, self._logs / "dashboard.log"))

    def __enter__(self) -> SideProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def look(self, say: Callable[[str], None]) -> None:
        """Start the processes that are due, and start again or give up those that have died."""
        for side in self._processes:
            if side.process is not None and side.process.poll() is not None:
                code = self._take(side)  # also after 0: a scheduler may signal every process
                if side.starts_at is None:
                    reason = error_message(side.log) or f"its process ended with {code}"
                    say(f"WARNING: {side.name} is not started again: {reason}. {side.remedy}")
            if side.process is None and side.starts_at is not None and time.monotonic() >= side.starts_at:
                self._start(side, say)

    def _take(self, side: _SideProcess) -> int:
        """Clear away a process that has ended, and decide when it is started again; return its exit code."""
        assert side.process is not None
        code = side.process.returncode
        side.process.kill()  # what it has started
        side.process = None
        delay_s = self._restarts.delay_s(side.name, code)
        side.starts_at = None if delay_s is None else time.monotonic() + delay_s
        return code

    def _start(self, side: _SideProcess, say: Callable[[str], None]) -> None:
        side.starts_at = None
        environment = {EVENTS_ENV: str(self._logs / "events.jsonl"), PROCESS_ENV: side.name, HEARTBEAT_ENV: ""}
        try:
            with held_back(signal.SIGTERM):
                side.process = THIS_MACHINE.start(side.argv, side.log, environment)
        except OSError as error:
            say(f"WARNING: {side.name} cannot be started: {error}. {side.remedy}")

    def stop_waiting(self) -> None:
        """Do not wait for trackers longer than a scheduler gives a run that it stops."""
        self._waits_s = min(self._waits_s, _STOPPING_S)

    def end(self) -> None:
        """Have every tracker take the rest; warn of one that has not in time. A tracker that crashes is tried again."""
        deadline = time.monotonic() + self._waits_s
        for side in self._processes:
            if side.process is None and side.starts_at is not None:  # it was to be started again
                self._start(side, print)
            if side.process is not None:
                side.process.signal(signal.SIGTERM)
        for side in self._processes:
            while side.process is not None:
                code = side.process.wait(max(0.0, deadline - time.monotonic()))
                if code is None:
                    side.process.kill()
                    print(f"WARNING: {side.name} has not finished in time. {side.remedy}", flush=True)
                    break
                self._take(side)
                if code and side.starts_at is not None and time.monotonic() < deadline:
                    self._start(side, print)
                    if side.process is not None:
                        side.process.signal(signal.SIGTERM)
                elif code:
                    print(f"WARNING: {side.name} ended with {code}. {side.remedy}", flush=True)
        self._processes = []
