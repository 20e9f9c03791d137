"""Profiles of some steps: what every rank computed, by torch's profiler, beside what all processes did meanwhile.

The step before the first one warms the profiler up, which takes seconds the first time. What is recorded is written
where the step behind the last one begins, and its timeline once more at the end of the run, with what went on until
then. No number of the run depends on it, and where it fails, the run goes on without.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from holdfast.shared.config.profile import ProfiledSteps
from holdfast.shared.files import durable
from holdfast.shared.files.run_dir import RunDir, profile_name
from holdfast.shared.files.timeline import read_spans
from holdfast.shared.process.events import report
from holdfast.shared.process.heartbeat import meanwhile
from holdfast.shared.process.timeline import Span, span
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.session.profile_file import ProfileFile, write_part

_WRITING_S = 3600.0
"""A trace of gigabytes takes minutes; a rank that takes longer counts as hung."""
_OTHER_PARTS_S = 5.0
"""How long rank 0 waits for the other ranks' parts where the run ends by an error: one of them may be dead."""
_POLL_S = 0.05
_FAILURES = (OSError, RuntimeError, AssertionError, MemoryError, msgspec.MsgspecError)
_log = logging.getLogger("trainer")


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
            path.with_name(f"{durable.TEMPORARY_PREFIX}{path.name}-rank_{rank}")
            for rank in range(self._mesh.world_size)
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
        work = durable.temporary_sibling(part)  # a directory: torch has a temporary name of its own beside the file
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
        while not all(map(durable.is_visible, parts)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        found = [part for part in parts if durable.is_visible(part)]
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
