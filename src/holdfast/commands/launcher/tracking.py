"""Trackers beside a run: one process each, which may die, hang or be slow without any effect on training."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.commands.launcher.hosts.host import Process
from holdfast.commands.launcher.hosts.local import THIS_MACHINE
from holdfast.commands.launcher.plan import Plan
from holdfast.commands.launcher.preflight import check_in_child
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.supervise import error_message
from holdfast.commands.track.cursor import label_of
from holdfast.commands.track.trackers import BUILT_IN, check_tracker
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.shared.process.heartbeat import HEARTBEAT_ENV
from holdfast.shared.process.import_path import module_command

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
        check_in_child("holdfast.commands.launcher.check_trackers", config.tracking)


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
            "holdfast.commands.track.process", str(self._run_dir.path), sender.tracker, self._config.model_dump_json()
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
