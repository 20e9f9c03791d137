"""Side services of the launcher: the Prometheus endpoint, the live page, and one process per tracker.

A tracker's process may die, hang or be slow without any effect on training.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.training import TrainingCommand
from holdfast.launcher.cluster.hosts import THIS_MACHINE, Process
from holdfast.launcher.plan import Plan, Restarts
from holdfast.launcher.preflight import check_in_child
from holdfast.launcher.supervise import error_message
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.process.heartbeat import HEARTBEAT_ENV
from holdfast.process.imports import module_command
from holdfast.view.report.serve import Dashboard, listening_for_browsers
from holdfast.view.trackers.interface import BUILT_IN, check_tracker
from holdfast.view.trackers.prometheus import PrometheusServer, listening_for_prometheus
from holdfast.view.trackers.sending import label_of
from holdfast.view.web import Listener


@dataclass(frozen=True)
class Listeners:
    """Where a launcher listens; None: it does not."""

    prometheus: Listener | None = None
    dashboard: Listener | None = None


@contextmanager
def listening_for(config: TrainingCommand) -> Iterator[Listeners]:
    """Listen wherever the settings say, before anything is started.

    Raises:
        ConfigError: a port is taken, or what is needed to serve there is not installed.
    """
    with (
        listening_for_prometheus(config.prometheus) as prometheus,
        listening_for_browsers(config.dashboard) as dashboard,
    ):
        yield Listeners(prometheus, dashboard)


class Endpoints:
    """Serves one run, over all attempts of this launcher; a context manager."""

    def __init__(self, listeners: Listeners, plan: Plan) -> None:
        run_dir = plan.attempt.run_dir
        self._prometheus = PrometheusServer(listeners.prometheus, run_dir, plan.trainer.program, leads=plan.node == 0)
        self._dashboard = Dashboard(listeners.dashboard, run_dir)
        self._open = ExitStack()

    def __enter__(self) -> Endpoints:
        with ExitStack() as stack:
            stack.enter_context(self._prometheus)
            stack.enter_context(self._dashboard)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, plan: Plan) -> None:
        """Serve another attempt."""
        engines = {name: health.url.removesuffix("/health") for name, health in plan.health.items()}
        self._prometheus.begin(plan.attempt.number, max_steps=plan.trainer.max_steps, engines=engines)

    def look(self, processes: dict[str, bool], say: Callable[[str], None]) -> None:
        """Take which processes live, and say what went wrong since the last call."""
        self._prometheus.look(processes, say)
        self._dashboard.look(say)


_MAX_RESTARTS, _WINDOW_S = 3, 600.0
_DYING_S = 10.0


def check_tracking(config: TrainingCommand) -> None:
    """Check that every tracker that the settings name is installed, before anything starts.

    Raises:
        ConfigError: one is not; with the command that installs it.
    """
    if config.tracking is None:
        return
    for name in config.tracking.backends:
        if name in BUILT_IN:
            check_tracker(name, key="tracking.backends")
    if any(name not in BUILT_IN for name in config.tracking.backends):
        check_in_child("holdfast.launcher.check_trackers", config.tracking)


@contextmanager
def held_back(number: signal.Signals) -> Iterator[None]:
    """Have what is started meanwhile get a signal only when it asks for it: it may come before there is a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Sender:
    """One tracker's process; None where it is not started again. `is_last`: no other follows it."""

    tracker: str
    process: Process | None
    starts_at: float = 0.0
    is_last: bool = False


class Senders:
    """The trackers' processes of one launcher, over all attempts; a context manager, which ends them."""

    def __init__(self, plan: Plan) -> None:
        config = plan.trainer.tracking if plan.node == 0 else None
        self._config = config
        self._run_dir = plan.attempt.run_dir
        self._logs = self._run_dir.logs(plan.attempt.number)
        self._restarts = Restarts(_MAX_RESTARTS, _WINDOW_S)
        self._senders = [_Sender(name, None) for name in config.backends] if config else []
        self._is_started = False
        self._waits_s = config.finish_timeout_s if config else 0.0

    def __enter__(self) -> Senders:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def look(self, say: Callable[[str], None]) -> None:
        """Start those that do not run yet, or again what has died, and say so."""
        for sender in self._senders:
            if sender.process is None or sender.process.poll() is None:
                if not self._is_started or (sender.starts_at and time.monotonic() >= sender.starts_at):
                    self._start(sender, say)
                continue
            code = sender.process.returncode
            delay_s = self._restarts.delay_s(sender.tracker, code)
            sender.process.kill()  # what it has started
            sender.process = None
            if delay_s is None:
                said = error_message(self._log_of(sender)) or f"its process ended with {code}"
                say(f"WARNING: {sender.tracker} gets no more of this run: {said}. {self._later(sender)}")
            else:
                sender.starts_at = time.monotonic() + delay_s
        self._is_started = True

    def _start(self, sender: _Sender, say: Callable[[str], None]) -> None:
        assert self._config is not None
        sender.starts_at = 0.0
        argv = module_command(
            "holdfast.view.trackers.process", str(self._run_dir.path), sender.tracker, self._config.model_dump_json()
        )
        environment = {
            EVENTS_ENV: str(self._logs / "events.jsonl"),
            PROCESS_ENV: sender.tracker,
            HEARTBEAT_ENV: "",
        }
        try:
            with held_back(signal.SIGTERM):
                sender.process = THIS_MACHINE.start(argv, self._log_of(sender), environment)
        except OSError as error:
            say(f"WARNING: {sender.tracker} gets nothing of this run: {error}. {self._later(sender)}")

    def _log_of(self, sender: _Sender) -> Path:
        return self._logs / f"tracking_{label_of(sender.tracker)}.log"

    def _later(self, sender: _Sender) -> str:
        return f"`track {self._run_dir.path} --to {sender.tracker}` sends what is missing."

    def stop_waiting(self) -> None:
        """Do not wait for trackers longer than a scheduler gives a run that it stops."""
        self._waits_s = min(self._waits_s, _DYING_S)

    def end(self) -> None:
        """Have every tracker take the rest; say which has not, in time. What has crashed is tried once more."""
        for sender in self._senders:
            if sender.process is None and sender.starts_at:  # it was to be started again: now, or never
                self._start(sender, print)
                sender.is_last = True
        running = [sender for sender in self._senders if sender.process is not None]
        for sender in running:
            assert sender.process is not None
            sender.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._waits_s
        for sender in running:
            code = self._ended(sender, deadline)
            if code and self._is_worth_a_try(sender, code) and time.monotonic() < deadline:
                code = self._once_more(sender, code, deadline)
            if code != 0:
                why = f"ended with {code}" if code is not None else "has not taken everything in time"
                print(f"WARNING: {sender.tracker} {why}. {self._later(sender)}", flush=True)
        self._senders = []

    def _is_worth_a_try(self, sender: _Sender, code: int) -> bool:
        return not sender.is_last and self._restarts.delay_s(sender.tracker, code) is not None

    def _once_more(self, sender: _Sender, code: int, deadline: float) -> int | None:
        """Start a tracker again that died in its last seconds; return how it ended, None: it has not in time."""
        sender.process = None
        self._start(sender, print)
        if sender.process is None:
            return code
        sender.process.signal(signal.SIGTERM)
        return self._ended(sender, deadline)

    @staticmethod
    def _ended(sender: _Sender, deadline: float) -> int | None:
        assert sender.process is not None
        code = sender.process.wait(max(0.0, deadline - time.monotonic()))
        sender.process.kill()
        return code
