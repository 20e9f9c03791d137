"""Processes beside a run: one for each tracker, and one for the live page.

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
from holdfast.launcher.plan import Plan
from holdfast.launcher.preflight import check_in_child
from holdfast.launcher.supervisor import REFRESH_S, STOP_SIGNALS, error_message
from holdfast.process.child import NotedSignals
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.process.heartbeat import HEARTBEAT_ENV
from holdfast.process.imports import module_command
from holdfast.run.choose_run import command_line
from holdfast.view.load_tracker import BUILT_IN, check_tracker
from holdfast.view.sending import label_of

_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 300.0
_SILENT_FAILURES = 3
"""This many kills in a row cause no warning."""
_STOPPING_S = 10.0
_REFUSED = 2
"""Exit code of a mistake that another start would only repeat."""


def check_outputs(config: TrainingCommand) -> None:
    """Check that the trackers of the settings are installed, and that the port of the live page is free. Raise
    ConfigError that names the remedy."""
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
        failures: that followed each other within `_LAST_DELAY_S`.
    """

    name: str
    argv: list[str]
    remedy: str
    log: Path
    process: Process | None = None
    starts_at: float | None = 0.0
    failures: int = 0
    has_warned: bool = False


class SideProcesses:
    """The side processes of one launcher, over all attempts; a context manager, which ends them."""

    def __init__(self, plan: Plan) -> None:
        run, config = plan.attempt.run_dir.path, plan.trainer
        self._logs = plan.attempt.run_dir.logs(plan.attempt.number)
        self._waits_s = config.tracking.finish_timeout_s if config.tracking else _STOPPING_S
        self._processes: list[_SideProcess] = []
        if config.tracking is not None:
            settings = config.tracking.model_dump_json()
            for name in config.tracking.backends:
                argv = module_command("holdfast.view.track", str(run), name, settings)
                remedy = f"`{command_line('track', run, ['--to', name])}` sends what is missing."
                log = self._logs / f"tracking_{label_of(name)}.log"
                self._processes.append(_SideProcess(name, argv, remedy, log))
        if config.dashboard is not None:
            argv = module_command("holdfast.view.serve", str(run), str(config.dashboard.port))
            remedy = f"`{command_line('report', run)}` makes the page."
            self._processes.append(_SideProcess("dashboard", argv, remedy, self._logs / "dashboard.log"))

    def __enter__(self) -> SideProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def look(self, say: Callable[[str], None]) -> None:
        """Start the processes that are due; a process that has died is due after a delay, which grows."""
        for side in self._processes:
            if side.process is not None and side.process.poll() is not None:
                self._take(side, say)
            if side.process is None and side.starts_at is not None and time.monotonic() >= side.starts_at:
                self._start(side, say)

    def begin_again(self) -> None:
        """Kill the trackers, for the run goes back to another way: the next look starts them, and they find that."""
        for side in self._processes:
            if side.process is not None and side.name != "dashboard":
                side.process.kill()

    def _take(self, side: _SideProcess, say: Callable[[str], None]) -> None:
        """Clear away a process that has ended, and decide when it is started again."""
        assert side.process is not None and side.starts_at is not None
        code, now = side.process.returncode, time.monotonic()
        side.process.kill()  # what it has started
        side.process = None
        side.failures = side.failures + 1 if now - side.starts_at < _LAST_DELAY_S else 1
        delay_s = min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** min(side.failures, 10))
        side.starts_at = None if code == _REFUSED else now + delay_s  # also after 0: a scheduler may signal all
        if code == _REFUSED or (not side.has_warned and (code > 0 or side.failures > _SILENT_FAILURES)):
            side.has_warned = True
            then = "" if code == _REFUSED else "It is tried again. "
            say(f"WARNING: {side.name}: {self._reason(side, code)}. {then}Training continues. {side.remedy}")

    @staticmethod
    def _reason(side: _SideProcess, code: int) -> str:
        return error_message(side.log) or f"its process ended with {code}"

    def _start(self, side: _SideProcess, say: Callable[[str], None]) -> None:
        environment = {EVENTS_ENV: str(self._logs / "events.jsonl"), PROCESS_ENV: side.name, HEARTBEAT_ENV: ""}
        try:
            with held_back(signal.SIGTERM):
                side.process = THIS_MACHINE.start(side.argv, side.log, environment)
            side.starts_at = time.monotonic()
        except OSError as error:
            side.starts_at = None
            say(f"WARNING: {side.name} cannot be started: {error}. {side.remedy}")

    def stop_waiting(self) -> None:
        """Do not wait for trackers longer than a scheduler gives a run that it stops."""
        self._waits_s = min(self._waits_s, _STOPPING_S)

    def end(self) -> None:
        """Let every tracker send the rest, with one retry; warn about slow trackers. A signal to stop ends the wait."""
        deadline = time.monotonic() + self._waits_s
        for side in self._processes:
            if side.process is None and side.starts_at is not None:  # it was to be started again
                self._start(side, print)
            if side.process is not None:
                side.process.signal(signal.SIGTERM)
        with NotedSignals(*STOP_SIGNALS) as signals:
            for side in self._processes:
                for is_last in (False, True):
                    if side.process is None:
                        break
                    code = _wait(side.process, deadline, signals.came)
                    side.process.kill()
                    if code in (0, _REFUSED, None) or is_last:
                        why = "it has not finished in time" if code is None else self._reason(side, code)
                        if code != 0:
                            print(f"WARNING: {side.name}: {why}. {side.remedy}", flush=True)
                        break
                    side.process = None
                    self._start(side, print)
                    if side.process is not None:
                        side.process.signal(signal.SIGTERM)
        self._processes = []


def _wait(process: Process, deadline: float, came: list[int]) -> int | None:
    """Return the exit code of `process`; None if it still runs at the `deadline` or when a signal has come."""
    while True:
        left_s = 0.0 if came else max(0.0, deadline - time.monotonic())
        code = process.wait(min(REFRESH_S, left_s))
        if code is not None or not left_s:
            return code
