"""The process that sends a run to one tracker while it is trained.

`python -m holdfast.view.trackers.process RUN TRACKER SETTINGS`, SETTINGS being the section `tracking` as JSON.

SIGTERM says that no further step comes: it sends the rest and ends.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.config.view import TrackingConfig
from holdfast.errors import ConfigError
from holdfast.process.child import die_with_launcher, run_reporting_errors, set_up_logging
from holdfast.process.events import append
from holdfast.run.run_dir import RunDir
from holdfast.view.trackers.main import temporary_files_of
from holdfast.view.trackers.sending import Sending, TrackerFailed

_log = logging.getLogger("holdfast")
_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 300.0
_LAST_RETRY_AFTER_S = 1.0


class _End:
    """Whether SIGTERM has come; waits that it ends."""

    def __init__(self) -> None:
        self.is_over = False
        self._receiver, self._sender = socket.socketpair()
        signal.signal(signal.SIGTERM, self._note)
        # Held back since the launcher has started this process: see `held_back` there.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        # The launcher alone says when it is over: a scheduler may signal every process.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def _note(self, *_: object) -> None:
        self.is_over = True
        self._sender.send(b"\0")  # select is begun again after a handler

    def wait(self, seconds: float) -> None:
        """Wait, until SIGTERM at the longest."""
        select.select([self._receiver], [], [], seconds)


def send_until_told(run_dir: RunDir, name: str, config: TrackingConfig) -> int:
    """Send until SIGTERM, and begin anew where a tracker fails; return 0 when it has everything, else 3.

    The last try begins behind SIGTERM: what failed before, or while that came, has one more.
    """
    end = _End()
    sending = Sending(run_dir, name, config)
    delay_s, told = _FIRST_RETRY_S, False
    while True:
        was_over = end.is_over
        try:
            sending.send(lambda: end.is_over, end.wait)
        except TrackerFailed as failure:
            _log.warning("%s", failure, exc_info=failure.__cause__)
            if not told:
                # Of the attempt that goes on now: this process outlives that in which it began.
                events = run_dir.newest_logs() / "events.jsonl"
                append(events, name, f"WARNING: {failure}. It is tried again; training goes on")
                told = True
            if was_over:
                return failure.exit_code
        else:
            return 0
        if end.is_over:  # it came while the tracker failed
            time.sleep(_LAST_RETRY_AFTER_S)
        end.wait(delay_s)
        delay_s = min(_LAST_RETRY_S, delay_s * 2)


def main(argv: Sequence[str]) -> None:
    """Send as `argv` says; never returns."""
    die_with_launcher()
    set_up_logging("tracking")
    if len(argv) != 3:
        raise ConfigError("usage: python -m holdfast.view.trackers.process RUN TRACKER SETTINGS")
    run, name, settings = argv
    config = TrackingConfig.model_validate_json(settings)
    with temporary_files_of(name):
        run_reporting_errors(lambda: sys.exit(send_until_told(RunDir(Path(run)), name, config)))


if __name__ == "__main__":
    main(sys.argv[1:])
