"""Follows a run: each look reads what its processes have appended to `metrics.jsonl` and `events.jsonl`."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from holdfast.errors import is_storage_failure
from holdfast.run.run_dir import RunDir
from holdfast.view.state import RECENT_STEPS, Alarm, Checkpoints, CheckpointWatch, Phase, RunState, TimeLeft

_KEPT_BYTES = 4096


class Tail:
    """Complete new lines of a growing file, as JSON objects; what is no object is left out.

    A file is known by what it says: by the last bytes that were read of it, which stand where they stood. Not by its
    number (inode): some file systems (SMB, FUSE, NFS) give one file another one later.

    Attributes:
        replaced: how often a file that says something else, or a shorter one, was found in its place. It was read from
            its begin then.
        failure: by which the storage did not give the last look all that is there; None where it did.
    """

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset = 0
        self._before = b""  # what stands before the offset
        self._seen: tuple[int, ...] | None = None  # of the file, when it was read to its end
        if from_end:
            with suppress(FileNotFoundError), open(path, "rb") as file:
                self._offset = file.seek(0, os.SEEK_END)
                file.seek(max(0, self._offset - _KEPT_BYTES))
                self._before = file.read(self._offset - file.tell())
        self.replaced = 0
        self.failure: OSError | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.failure = None
        try:
            yield from self._new_lines()
        except FileNotFoundError:  # nothing is written yet
            return
        except OSError as error:
            self.failure = error
            if not is_storage_failure(error):
                raise  # else they are read when the storage gives them again

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        status = os.stat(self._path)  # noqa: PTH116 - ten times a second
        seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return
        with open(self._path, "rb") as file:
            self._find_place(file)
            for line in file:
                # Half a line: it is read whole at a later look, as the offset stays before it.
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._before = (self._before + line)[-_KEPT_BYTES:]
                if isinstance(value := _decoded(line), dict):
                    yield value
        self._seen = seen  # of before it was read: what came meanwhile is read at the next look

    def _find_place(self, file: BinaryIO) -> None:
        """Go to the offset, or to the begin of a file that is another one."""
        file.seek(self._offset - len(self._before))
        # A line that was in it may be cut off again: the storage was full.
        if file.read(len(self._before)) != self._before:
            self._offset, self._before = 0, b""
            self.replaced += 1
            file.seek(0)


def _decoded(line: bytes) -> Any:
    """Return the JSON of a line; None where it has none: a full disk took a part of it only, or a bit has flipped."""
    try:
        try:
            return msgspec.json.decode(line)  # a fifth of the time of what reads every dialect
        except ValueError:
            return json.loads(line)  # NaN is no JSON, and many write it
    except (ValueError, RecursionError):  # the latter of brackets without an end
        return None


_ATTEMPT = re.compile(r"attempt_(\d+)")
_LOOK_AT_FILES_S = 1.0
# Those of earlier attempts are written no more, but for what an inference server says that outlived its attempt.
_LIVE_ATTEMPTS = 2


@dataclass(frozen=True)
class Stepped:
    """A step has ended.

    Attributes:
        left_s: for the steps that are left, where that can be said.
    """

    metrics: dict[str, Any]
    left_s: float | None


News = Stepped | Phase | Alarm


class Follower:
    """Reads the files of a run, and writes none.

    Args:
        events: the file with all events, of what has no attempts; unset: one for each attempt.
        events_name: of the file with the events, which every node of several has for itself.
        attempt: that is about to begin; unset: whatever attempts there are, and come.
        max_steps: that the run trains until, where that is known before its settings are read.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        events: Path | None = None,
        events_name: str = "events.jsonl",
        attempt: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._events_name = events_name
        self._metrics = Tail(run_dir.metrics, from_end=False)
        self._events: dict[int, Tail] = {}
        self._seen: set[int] = set()
        if events is not None:
            self._events[1] = Tail(events, from_end=False)
        self._watch = CheckpointWatch(run_dir.checkpoints)
        self._time_left = TimeLeft()
        self._looked = -math.inf
        self._is_owed = False  # steps that have been, and are not known yet
        self._unseen: deque[tuple[int, float | None]] = deque(maxlen=RECENT_STEPS)
        self.state = RunState(max_steps=max_steps)
        if attempt is not None:  # its first words are not waited for until the next look
            self._add(attempt)

    @property
    def checkpoints(self) -> Checkpoints:
        """What was found at the last look."""
        return self._watch.last

    def set_max_steps(self, max_steps: int) -> None:
        """Set the step that the newest attempt trains until."""
        self.state.max_steps = max_steps

    def catch_up(self) -> None:
        """Take in all that was written until now, as what has been."""
        self._is_owed = True
        for _ in self.news():
            pass

    def news(self) -> Iterator[News]:
        """Take in what was written since the last look, and give it: what is said of a step comes after the step."""
        # Before the steps are read: the steps that these events follow are then there.
        told = deque(self._new_events())
        for stepped in self._new_steps():
            while told and not _is_after(told[0], int(stepped.metrics["step"])):
                yield told.popleft()
            yield stepped
        yield from told

    def _new_steps(self) -> Iterator[Stepped]:
        replaced = self._metrics.replaced
        rest = iter(self._metrics)
        # What is there is known with the first line only.
        first = next(rest, None)
        if self._metrics.replaced != replaced:
            self.state.forget_steps()
            self._unseen.clear()
            self._is_owed = True
        lines = (line for line in chain(() if first is None else (first,), rest) if _is_step(line))
        if self._is_owed:
            self._take_in(lines)
            return
        for line in list(lines):
            self.state.take_step(line, now=time.time())
            self.state.left_s = self._time_left.after(
                self.state.step,
                max_steps=self.state.max_steps,
                now=time.monotonic(),
                step_s=line.get("time/step") or None,
            )
            yield Stepped(line, self.state.left_s)

    def _take_in(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take in steps that nobody saw end, one by one; those that the storage does not give are owed still."""
        try:
            ended = self._run_dir.metrics.stat().st_mtime
        except OSError:
            ended = time.time()
        for line in lines:
            self.state.take_step(line, now=ended)
            self._unseen.append((int(line["step"]), line.get("time/step")))
        self.state.left_s = self._time_left.begin_with(
            self._unseen, max_steps=self.state.max_steps, now=time.monotonic()
        )
        self._is_owed = self._metrics.failure is not None
        if not self._is_owed:
            self._unseen.clear()

    def _new_events(self) -> Iterator[Phase | Alarm]:
        if time.monotonic() - self._looked >= _LOOK_AT_FILES_S:
            self._look_at_files()
        for number in sorted(self._events):
            for event in self._events[number]:
                told = self.state.take_event(event, attempt=number)
                if told is not None:
                    yield told

    def _look_at_files(self) -> None:
        """Find new attempts, leave those alone that nobody writes to any more, and look at the checkpoints."""
        self._looked = time.monotonic()
        self._watch.look()
        new = set(attempts_with_logs(self._run_dir)) - self._seen
        if not new:  # those that were there have been read once
            live = sorted(self._events)[-_LIVE_ATTEMPTS:]
            self._events = {number: self._events[number] for number in live}
        for number in new:
            self._add(number)

    def _add(self, attempt: int) -> None:
        self._seen.add(attempt)
        self._events[attempt] = Tail(self._run_dir.logs(attempt) / self._events_name, from_end=False)


def attempts_with_logs(run_dir: RunDir) -> Iterator[int]:
    """Yield the numbers of the attempts whose logs are there, in no order."""
    try:
        names = [path.name for path in (run_dir.path / "logs").iterdir()]
    except OSError:
        return
    for name in names:
        if match := _ATTEMPT.fullmatch(name):
            yield int(match[1])


def _is_after(told: Phase | Alarm, step: int) -> bool:
    """Whether `told` is said of a step that is not before `step`."""
    of = told.step if isinstance(told, Alarm) else told.details.get("step")
    return isinstance(of, int) and of >= step


def _is_step(line: dict[str, Any]) -> bool:
    return isinstance(line.get("step"), int)
