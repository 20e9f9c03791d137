"""Profiles some steps: the computation of every rank, by torch's profiler, and the timeline of all processes.

The step before the first profiled step warms up the profiler, which takes seconds the first time. The profiler writes
the profile when the step after the last profiled step begins, and its timeline again at the end of the run. No result
of the run depends on a profile; if profiling fails, the run continues without it.

The file has Chrome's trace events (JSON). Every rank converts its own trace into a part: a gzip member of events, each
followed by a comma. Consecutive gzip members are one gzip file, so rank 0 only joins a beginning, the parts and an end.

- https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace event format)
- https://www.rfc-editor.org/rfc/rfc1952#section-2.2 (members)
"""

from __future__ import annotations

import gzip
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import msgspec
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from holdfast.config.view import ProfiledSteps
from holdfast.process.events import report
from holdfast.process.heartbeat import meanwhile
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir, profile_name
from holdfast.run.timeline import Span, read_spans, span
from holdfast.trainer.mesh import Mesh

_log = logging.getLogger("trainer")

BASE_S = 1_767_225_600
"""Times are counted from here, 2026 in UTC: as microseconds since 1970 they would lose what is below 0.25 µs."""
_LEVEL = 3  # such text shrinks to about a tenth at any level, and the highest ones take minutes for that
_CHUNK_EVENTS = 10_000
_CHUNK_BYTES = 1 << 24
_PIDS_OF_A_RANK = 1000
_ORDER = ("trainer", "orchestrator", "evaluation")


class Event(msgspec.Struct, omit_defaults=True):
    """One trace event; what torch writes beside these fields is not kept.

    Attributes:
        ph: its kind: `X` a slice, `M` metadata, `s` and `f` the ends of an arrow, `i` an instant.
        pid, tid, ts: written also where they are 0, unlike the others: readers expect them of every event.
        ts, dur: microseconds.
        id: of an arrow.
    """

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = msgspec.field(default_factory=int)
    tid: int | str = msgspec.field(default_factory=int)
    ts: float = msgspec.field(default_factory=float)
    dur: float | None = None
    id: int | None = None
    bp: str = ""
    s: str = ""
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _TorchTrace(msgspec.Struct):
    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


def write_part(raw: Path, part: Path, *, rank: int, pid: int) -> None:
    """Write what torch exported to `raw` as the part of `rank`.

    Args:
        pid: of the process that was profiled.

    Raises:
        OSError: the storage does not take it.
        msgspec.DecodeError: `raw` is not whole.
    """
    trace = msgspec.json.decode(raw.read_bytes(), type=_TorchTrace)
    shift_us = trace.baseTimeNanoseconds / 1000 - BASE_S * 1e6
    with gzip.open(part, "wb", compresslevel=_LEVEL) as file:
        _write(file, _of_rank(trace.traceEvents, shift_us, rank=rank, pid=pid))


def _of_rank(events: Sequence[Event], shift_us: float, *, rank: int, pid: int) -> Iterator[Event]:
    """Yield the events with times and numbers that go together with those of other ranks and machines.

    Processes of two machines may have the same number, and devices and arrows of all ranks are counted from 0.
    """
    # Beside them there are events of the profiler itself, of processes with names such as `Spans`.
    used = {event.pid for event in events if event.ph != "M" and isinstance(event.pid, int)}
    first = (rank + 1) * _PIDS_OF_A_RANK
    pids = {old: first if old == pid else first + 1 + number for number, old in enumerate(sorted(used, key=int))}
    for old, new in pids.items():
        name = f"trainer rank {rank}" if old == pid else f"trainer rank {rank}: GPU {old}"
        yield from _named(new, name)
    for event in events:
        if event.pid not in pids or event.name in ("process_name", "process_labels", "process_sort_index"):
            continue
        event.pid, event.ts = pids[event.pid], round(event.ts + shift_us, 3)
        if event.id is not None:
            event.id += rank << 32
        yield event


def _named(pid: int, name: str) -> list[Event]:
    """Return what gives a process its name, and its place by its number."""
    return [_metadata("process_name", pid, name=name), _metadata("process_sort_index", pid, sort_index=pid)]


def _metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return Event("M", kind, pid=pid, tid=tid, args=_raw(args))


def _raw(args: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(args))


def span_events(spans: Iterable[Span]) -> Iterator[Event]:
    """Yield the events of a timeline: a process for each process, and a thread for each of its lanes."""
    key = lambda one: (_rank(one.process), one.process, one.lane)  # noqa: E731 - it sorts and groups
    pids: dict[str, int] = {}
    tids = itertools.count(1)
    for (_, process, lane), group in itertools.groupby(sorted(spans, key=key), key):
        if process not in pids:
            pids[process] = len(pids) + 1
            yield from _named(pids[process], f"{process}: timeline")
        for number, track in enumerate(_tracks(list(group))):
            tid = next(tids)
            name = lane or "main work"
            yield _metadata("thread_name", pids[process], tid, name=f"{name} ({number + 1})" if number else name)
            yield _metadata("thread_sort_index", pids[process], tid, sort_index=tid)
            for one in track:
                args = {"step": one.step, "version": one.version, "count": one.count if one.count > 1 else None}
                yield Event(
                    "X",
                    one.name,
                    "timeline",
                    pids[process],
                    tid,
                    round((one.begin - BASE_S) * 1e6, 3),
                    round(max(0.0, one.end - one.begin) * 1e6, 3),
                    args=_raw({name: value for name, value in args.items() if value is not None}),
                )


def _rank(process: str) -> int:
    return _ORDER.index(process) if process in _ORDER else len(_ORDER)


def _tracks(spans: list[Span]) -> list[list[Span]]:
    """Divide the spans of a lane: of two in one thread, one has to end before the other begins, or to enclose it."""
    tracks: list[list[Span]] = []
    enclosing: list[list[Span]] = []  # of each track, those that are open still, the inner ones behind
    for one in sorted(spans, key=lambda each: (each.begin, -each.end)):
        for open_spans in enclosing:
            while open_spans and open_spans[-1].end <= one.begin:
                open_spans.pop()
        fits = [not open_spans or open_spans[-1].end >= one.end for open_spans in enclosing]
        if not any(fits):
            tracks.append([])
            enclosing.append([])
        number = fits.index(True) if any(fits) else -1
        tracks[number].append(one)
        enclosing[number].append(one)
    return tracks


def _write(file: gzip.GzipFile, events: Iterable[Event]) -> None:
    rest = iter(events)
    while chunk := list(itertools.islice(rest, _CHUNK_EVENTS)):
        file.write(b",\n" + msgspec.json.encode(chunk)[1:-1])


class ProfileFile:
    """A profile under its final name, which is whole at any moment; the timeline in it can be written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes_of_ranks = 0

    def assemble(self, parts: Sequence[Path], spans: Iterable[Span]) -> None:
        """Make the file of the parts of ranks and of a timeline.

        Raises:
            OSError: the storage does not take it; nothing has the final name then.
        """
        with _replacing(self.path) as file:
            file.write(_begin())
            for part in parts:
                with open(part, "rb") as source:
                    _copy(source, file, part.stat().st_size)
            self._bytes_of_ranks = file.tell()
            file.write(_end(spans))

    def renew_timeline(self, spans: Iterable[Span]) -> None:
        """Put `spans` in the place of those that the file holds.

        Raises:
            OSError: the storage does not take it; the file stays as it was.
        """
        with open(self.path, "rb") as source, _replacing(self.path) as file:
            _copy(source, file, self._bytes_of_ranks)
            file.write(_end(spans))


def _begin() -> bytes:
    # With one event, so that every other one may stand behind a comma.
    version = msgspec.json.encode(_metadata("trace_format_version", 0, name="1"))
    base = b'{"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[\n' % (BASE_S * 10**9)
    return gzip.compress(base + version, _LEVEL, mtime=0)


def _end(spans: Iterable[Span]) -> bytes:
    events = b"".join(b",\n" + msgspec.json.encode(event) for event in span_events(spans))
    return gzip.compress(events + b"\n]}\n", _LEVEL, mtime=0)


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size > 0 and (chunk := source.read(min(size, _CHUNK_BYTES))):
        target.write(chunk)
        size -= len(chunk)


class _replacing:
    """A file to write into that gets the name `path` behind the block, durably; where that raises, nothing stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = atomic.temporary_sibling(path)

    def __enter__(self) -> IO[bytes]:
        self._file = open(self._temporary, "wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.rename(self._temporary, self._path)
                atomic.fsync_directory(self._path.parent)
        finally:
            self._temporary.unlink(missing_ok=True)


_WRITING_S = 3600.0
"""A trace of gigabytes takes minutes; a rank that takes longer counts as hung."""
_OTHER_PARTS_S = 5.0
"""How long rank 0 waits for the other ranks' parts where the run ends by an error: one of them may be dead."""
_POLL_S = 0.05
_FAILURES = (OSError, RuntimeError, AssertionError, MemoryError, msgspec.MsgspecError)


class Profiler:
    """Records the steps of `window` that come behind step `done`."""

    def __init__(self, window: ProfiledSteps, run_dir: RunDir, mesh: Mesh, *, done: int) -> None:
        self._mesh = mesh
        self._logs = run_dir.newest_logs()
        self._first, self._last = max(window.first, done + 1), window.last
        self._step = done
        self._torch: profile | None = None
        self._begin_s = self._end_s = 0.0
        self._file: ProfileFile | None = None
        self._is_over = False
        self._has_failed = False

    def begin_step(self, step: int) -> None:
        """Begin or end the profile, if it is time to. Collective where it ends."""
        self._step = step
        if step == self._last + 1:
            self._end_of(self._last)
        if self._torch is not None:
            self._try(self._torch.step)
        elif self._first - 1 <= step <= self._last and not self._has_failed:
            self._try(self._start)
        if step == self._first:
            self._begin_s = time.time()  # now: what has just started may have taken seconds

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose block gets `name` in the trace."""
        return record_function(name) if self._torch is not None else nullcontext()

    def end(self) -> None:
        """Say that the last step of the run is done. Collective."""
        if self._step == self._last:
            self._end_of(self._last)

    def stop(self, done: int, *, is_agreed: bool) -> None:
        """Write what was recorded so far, where the run ends before its last step.

        Args:
            done: the last step that is done.
            is_agreed: every rank was asked to stop behind that step, so collectives can be relied upon.
        """
        is_empty = is_agreed and done < self._first
        if self._first <= self._step <= self._last and not self._is_over and not is_empty:
            self._end_of(max(done, self._first), is_agreed=is_agreed)
        self.close()

    def close(self) -> None:
        """Add to the timeline what has ended since it was written."""
        file = self._file
        if file is not None:
            self._try(lambda: file.renew_timeline(self._spans()))

    def _start(self) -> None:
        if self._mesh.device.type == "cpu":
            # It says as errors that there is no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._mesh.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)  # untested: needs a GPU
        profiler = profile(activities=activities, schedule=self._action)
        # It counts steps from 0, by itself: its marks shall have the numbers of ours.
        profiler.step_num, profiler.current_action = self._step, self._action(self._step)
        self._torch = profiler
        profiler.start()

    def _action(self, step: int) -> ProfilerAction:
        return ProfilerAction.WARMUP if step < self._first else ProfilerAction.RECORD

    def _end_of(self, last: int, *, is_agreed: bool = True) -> None:
        """Write the profile, up to now, as one that ends with step `last`. Collective if `is_agreed`."""
        self._is_over, self._end_s = True, time.time()
        path = self._logs / profile_name(self._first, last)
        # Told apart by their names alone: whichever rank writes last, rank 0 finds them all.
        parts = [
            path.with_name(f"{atomic.TEMPORARY_PREFIX}{path.name}-rank_{rank}") for rank in range(self._mesh.world_size)
        ]
        with meanwhile("writing the profile", bound_s=_WRITING_S), span("write_profile", step=last):
            self._try(lambda: self._write_part(parts[self._mesh.rank]))
            self._torch = None
            if is_agreed:
                self._mesh.barrier()
            if self._mesh.is_main:
                self._try(lambda: self._assemble(path, parts, waits=not is_agreed))
                self._try(lambda: [part.unlink(missing_ok=True) for part in parts])

    def _write_part(self, part: Path) -> None:
        """Write the trace of this rank, if there is one."""
        if self._torch is None:
            return
        self._torch.stop()  # first: it must not record on where the rest fails
        work = atomic.temporary_sibling(part)  # a directory: torch has a temporary name of its own beside the file
        raw, whole = work / "torch.json", work / "part"
        try:
            work.mkdir()
            self._torch.export_chrome_trace(str(raw))
            if not raw.is_file():  # it says so on stderr alone
                raise OSError(f"torch could not write its trace to {self._logs}: is that full, or read-only?")
            write_part(raw, whole, rank=self._mesh.rank, pid=os.getpid())
            os.rename(whole, part)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _assemble(self, path: Path, parts: list[Path], *, waits: bool) -> None:
        """Make one file of the parts of all ranks."""
        deadline = time.monotonic() + (_OTHER_PARTS_S if waits else 0.0)
        while not all(map(atomic.is_visible, parts)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        found = [part for part in parts if atomic.is_visible(part)]
        if not found:
            return  # every rank has said why
        if missing := [rank for rank, part in enumerate(parts) if part not in found]:
            report(f"WARNING: the profile lacks ranks {', '.join(map(str, missing))}; trainer.log says why")
        file = ProfileFile(path)
        file.assemble(found, self._spans())
        self._file = file
        report("wrote profile", path=str(path))

    def _spans(self) -> list[Span]:
        """Return what the timelines of this attempt tell of the profiled time."""
        spans = [one for path in sorted(self._logs.glob("timeline_*.jsonl")) for one in read_spans(path, attempt=0)]
        return [one for one in spans if one.end >= self._begin_s and one.begin <= self._end_s]

    def _try(self, action: Callable[[], object]) -> None:
        """Do what may fail without harm to the run; say so once, and profile no more."""
        try:
            action()
        except _FAILURES as error:
            self._torch = None
            if self._has_failed:
                return
            self._has_failed = True
            said = f"the profile is left out, or incomplete: {str(error) or type(error).__name__}"
            if self._mesh.is_main:
                report(f"WARNING: {said}")
            else:
                _log.warning("rank %d: %s", self._mesh.rank, said)
