"""Heartbeats: a process that is stopped, or stuck so hard that no thread runs, is noticed from outside.

The launcher names a file in the environment; a thread of the process touches it every second. What
counts is that its time changes, not what it is, so clocks may jump.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

_log = logging.getLogger("triad")

HEARTBEAT_ENV = "TRIAD_HEARTBEAT"
PERIOD_S = 1.0
PROBE_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
# A process imports before its first beat, for seconds on a busy machine.
_FIRST_BEAT_S = 30.0


class Heartbeat:
    """Beats for as long as this process lives, or until `end`.

    Args:
        path: the file to touch; None: nobody asked for beats.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if path is not None:
            self._thread.start()

    def _beat(self) -> None:
        assert self._path is not None
        while not self._ended.is_set():
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_bytes(b"")
                os.utime(self._path)
            except OSError as error:  # a storage that fails for a moment must not make a living process look dead
                _log.warning("no heartbeat: %s", error)
            self._ended.wait(PERIOD_S)

    def end(self) -> None:
        """Be no part of what is watched any more: the others may live on for a while."""
        if self._path is not None:
            self._ended.set()
            self._thread.join()
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s stays: %s", self._path, error)


def start_heartbeat(name: str = "") -> Heartbeat:
    """Beat, if the launcher asked for it.

    Args:
        name: distinguishes processes that share one environment, such as ranks.
    """
    prefix = os.environ.get(HEARTBEAT_ENV)
    return Heartbeat(Path(f"{prefix}{name}") if prefix else None)


class Vitals:
    """Signs of life of one process: its heartbeats, and the answers of its health route where it has one.

    A health route that generates a token for its answer tells a hung engine from a living one.

    Args:
        probe_period_s: between a good answer of the health route and the next question. It counts as
            silence, so it must be well below what is taken for death.
    """

    def __init__(
        self, heartbeat: Path, health_url: str | None = None, *, probe_period_s: float = PROBE_PERIOD_S
    ) -> None:
        self._prefix = heartbeat
        self._begin = time.monotonic()
        self._seen: dict[Path, tuple[int, float]] = {}
        self._health = HealthProbe(health_url, probe_period_s) if health_url else None

    def silent_s(self) -> float:
        """Return for how long the most silent of the parts that ever gave a sign has been silent.

        Where none ever did, the silence counts from `_FIRST_BEAT_S` after the start.
        """
        now = time.monotonic()
        longest = self._health.silent_s() if self._health else 0.0
        for path in self._prefix.parent.glob(f"{self._prefix.name}*"):
            try:
                beat = path.stat().st_mtime_ns
            except FileNotFoundError:  # this part has just ended
                continue
            known = self._seen.get(path)
            if known is None or known[0] != beat:
                self._seen[path] = (beat, now)
            else:
                longest = max(longest, now - known[1])
        return longest if self._seen else max(longest, now - self._begin - _FIRST_BEAT_S)

    def forget(self) -> None:
        """Start again, for a process that takes the place of another."""
        for path in self._prefix.parent.glob(f"{self._prefix.name}*"):
            path.unlink(missing_ok=True)
        self._seen.clear()
        self._begin = time.monotonic()
        if self._health:
            self._health.forget()


class HealthProbe:
    """Asks a health route again and again, in a thread, and remembers when it last answered well."""

    def __init__(self, url: str, period_s: float) -> None:
        self._url = url
        self._period_s = period_s
        self._last_good: float | None = None
        threading.Thread(target=self._ask, name="health", daemon=True).start()

    def silent_s(self) -> float:
        """Return the seconds since the last good answer; 0 before the first."""
        return time.monotonic() - self._last_good if self._last_good is not None else 0.0

    def forget(self) -> None:
        """Wait for a first good answer again."""
        self._last_good = None

    def _ask(self) -> None:
        while True:
            asked = time.monotonic()
            try:
                with urllib.request.urlopen(self._url, timeout=_HEALTH_TIMEOUT_S):
                    self._last_good = asked
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                time.sleep(PERIOD_S)  # nobody there, or not well: its silence is what counts
            else:
                time.sleep(self._period_s)
