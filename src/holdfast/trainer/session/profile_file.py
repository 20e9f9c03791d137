"""The file of a profile: the traces of all ranks and the timeline of all processes, as Chrome's trace events (JSON).

Every rank brings its own trace into the form of the file, as a part: a gzip member of events, each behind a comma.
Members that follow one another are one gzip file, so rank 0 only puts a beginning, the parts and an end together, and
a profile of gigabytes is compressed once, by many ranks at the same time.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace event format)
https://www.rfc-editor.org/rfc/rfc1952#section-2.2 (members)
"""

from __future__ import annotations

import gzip
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from holdfast.shared.files import durable
from holdfast.shared.process.timeline import Span

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
    key = lambda span: (_rank(span.process), span.process, span.lane)  # noqa: E731 - it sorts and groups
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
            for span in track:
                args = {"step": span.step, "version": span.version, "count": span.count if span.count > 1 else None}
                yield Event(
                    "X",
                    span.name,
                    "timeline",
                    pids[process],
                    tid,
                    round((span.begin - BASE_S) * 1e6, 3),
                    round(max(0.0, span.end - span.begin) * 1e6, 3),
                    args=_raw({name: value for name, value in args.items() if value is not None}),
                )


def _rank(process: str) -> int:
    return _ORDER.index(process) if process in _ORDER else len(_ORDER)


def _tracks(spans: list[Span]) -> list[list[Span]]:
    """Divide the spans of a lane: of two in one thread, one has to end before the other begins, or to enclose it."""
    tracks: list[list[Span]] = []
    enclosing: list[list[Span]] = []  # of each track, those that are open still, the inner ones behind
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        for open_spans in enclosing:
            while open_spans and open_spans[-1].end <= span.begin:
                open_spans.pop()
        fits = [not open_spans or open_spans[-1].end >= span.end for open_spans in enclosing]
        if not any(fits):
            tracks.append([])
            enclosing.append([])
        number = fits.index(True) if any(fits) else -1
        tracks[number].append(span)
        enclosing[number].append(span)
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
        self._temporary = durable.temporary_sibling(path)

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
                durable.fsync_directory(self._path.parent)
        finally:
            self._temporary.unlink(missing_ok=True)
