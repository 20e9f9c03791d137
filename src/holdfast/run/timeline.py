"""Timelines: each process records when it does what, and readers such as `report` load the records.

Each process of a run appends to its own file, `logs/attempt_K/timeline_<process>.jsonl`, since several hosts could not
append to one file of a network filesystem. A process writes a line when its span has ended, by one `write`; readers
take whole lines only. No result depends on the timeline: if it cannot be written, the process logs that once.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.run.run_dir import RunDir

_log = logging.getLogger("holdfast")


class Span(msgspec.Struct, omit_defaults=True, frozen=True):
    """A stretch of time that a process spent on one thing.

    Attributes:
        process: `trainer` (rank 0), `orchestrator`, `evaluation`.
        name: of the work, as in the metric `time/<name>`; `start`, of no length, says
            that the process began, after `step`.
        begin, end: Unix time in seconds.
        step: the optimizer step that it is for; None where it is for none.
        version: of the policy that is meant.
        lane: of work beside the main work of the process, such as writing a checkpoint; empty: the main work. Spans of
            one lane do not overlap, except spans with a `count`.
        count: more than 1: so many spans of this name are merged, from the begin of the first to the end of the last.
        attempt: set by who reads, from the directory that the line is in.
    """

    process: str
    name: str
    begin: float
    end: float
    step: int | None = None
    version: int | None = None
    lane: str = ""
    count: int = 1
    attempt: int = 0


class _Writer:
    """Appends spans of `process` to a file, as far as the storage takes them."""

    def __init__(self, path: Path, process: str) -> None:
        self.process = process
        self._path = path
        self._descriptor: int | None = None
        self._has_warned = False
        self._lock = threading.Lock()

    def write(self, span: Span) -> None:
        line = msgspec.json.encode(span) + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self._close()
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning("%s lacks lines: %s. Only reports show less for it.", self._path, error)

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if os.fstat(self._descriptor).st_size:
                line = b"\n" + line  # a process that was killed here, or a full disk, may have left a part of a line
        if os.write(self._descriptor, line) < len(line):
            raise OSError("the storage took a part of a line")

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # of a network filesystem; the descriptor is closed all the same
                os.close(descriptor)


_own: _Writer | None = None


def start_timeline(logs: Path, process: str, *, step: int | None = None) -> None:
    """Record from now on what this process does, and that it starts.

    Args:
        logs: directory of the attempt's logs.
        process: its name.
        step: the last finished step.
    """
    global _own
    if _own is not None:
        _own.close()
    _own = _Writer(logs / f"timeline_{process}.jsonl", process)
    now = time.time()
    record("start", now, now, step=step)


def record(
    name: str,
    begin: float,
    end: float,
    *,
    step: int | None = None,
    version: int | None = None,
    lane: str = "",
    count: int = 1,
) -> None:
    """Append one span, as the fields of `Span` say; does nothing without `start_timeline`. For any thread.
    Never raises for the storage."""
    if _own is not None:
        begin, end = round(begin, 6), round(end, 6)
        _own.write(Span(_own.process, name, begin, end, step=step, version=version, lane=lane, count=count))


@contextmanager
def span(name: str, *, step: int | None = None, version: int | None = None, lane: str = "") -> Iterator[None]:
    """Record the time of the block, also where it raises."""
    begin, started = time.time(), time.perf_counter()
    try:
        yield
    finally:
        # The clock of the day may be set meanwhile.
        record(name, begin, begin + time.perf_counter() - started, step=step, version=version, lane=lane)


_DECODER = msgspec.json.Decoder(Span)


def read_timeline(run_dir: RunDir) -> list[Span]:
    """Return the spans of all processes and attempts whose logs are still there, by their begin. Lines that are not
    whole, of a process that was killed or is writing, are left out. Raise OSError if a file is there and cannot be
    read."""
    spans: list[Span] = []
    for attempt, path in run_dir.logged("timeline_*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # a resume has just removed an old attempt
            spans += read_spans(path, attempt=attempt)
    return sorted(spans, key=lambda one: one.begin)


def read_spans(path: Path, *, attempt: int) -> list[Span]:
    """Return the whole lines of one file, as lines of `attempt`. Raise OSError if it cannot be read."""
    spans: list[Span] = []
    for line in path.read_bytes().splitlines():
        try:
            one = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        spans.append(msgspec.structs.replace(one, attempt=attempt))
    return spans
