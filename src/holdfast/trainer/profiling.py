"""Profiles some steps of the trainer by torch's profiler: one trace of each rank, as torch writes the trace.

The step before the first profiled step warms up the profiler, which takes seconds the first time. Each rank writes its
trace when the step after the last profiled step begins. No result of the run depends on a profile; if profiling fails,
the run continues without it.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from holdfast.config.view import ProfiledSteps
from holdfast.process.events import report
from holdfast.process.heartbeat import meanwhile
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir, profile_name
from holdfast.run.timeline import span
from holdfast.trainer.mesh import Mesh

_log = logging.getLogger("trainer")

_LEVEL = 3  # such text shrinks to about a tenth at any level, and the highest ones take minutes for that
_WRITING_S = 3600.0
"""A trace of gigabytes takes minutes; a rank that takes longer counts as hung."""
_FAILURES = (OSError, RuntimeError, AssertionError, MemoryError)


class Profiler:
    """Records the steps of `window` after step `done`."""

    def __init__(self, window: ProfiledSteps, run_dir: RunDir, mesh: Mesh, *, done: int) -> None:
        self._mesh = mesh
        self._logs = run_dir.newest_logs()
        self._first, self._last = max(window.first, done + 1), window.last
        self._step = done
        self._torch: profile | None = None
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

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose block gets `name` in the trace."""
        return record_function(name) if self._torch is not None else nullcontext()

    def end(self) -> None:
        """Say that the last step of the run is done. Collective."""
        if self._step == self._last:
            self._end_of(self._last)

    def stop(self, done: int, *, is_agreed: bool) -> None:
        """Write what was recorded so far, if the run ends before its last step.

        Args:
            done: the last step that is done.
            is_agreed: every rank was asked to stop after step `done`, so collectives can be relied upon.
        """
        is_empty = is_agreed and done < self._first
        if self._first <= self._step <= self._last and not self._is_over and not is_empty:
            self._end_of(max(done, self._first), is_agreed=is_agreed)

    def _start(self) -> None:
        if self._mesh.device.type == "cpu":
            # Kineto reports as errors that there is no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._mesh.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)  # untested: needs a GPU
        profiler = profile(activities=activities, schedule=self._action)
        # torch's profiler counts steps from 0 by itself: its marks must have the run's step numbers.
        profiler.step_num, profiler.current_action = self._step, self._action(self._step)
        self._torch = profiler
        profiler.start()

    def _action(self, step: int) -> ProfilerAction:
        return ProfilerAction.WARMUP if step < self._first else ProfilerAction.RECORD

    def _end_of(self, last: int, *, is_agreed: bool = True) -> None:
        """Write the profile up to now, as a profile that ends with step `last`. Collective if `is_agreed`."""
        self._is_over = True
        with meanwhile("writing the profile", bound_s=_WRITING_S), span("write_profile", step=last):
            self._try(lambda: self._write(self._logs / profile_name(self._first, last)))
            self._torch = None
            if is_agreed:
                self._mesh.barrier()  # within `meanwhile`: a fast rank waits here for a slow rank, and does not hang

    def _write(self, folder: Path) -> None:
        """Write the trace of this rank into `folder`, durably and whole."""
        if self._torch is None:
            return
        self._torch.stop()  # first: the profiler must not record on if the rest fails
        work = atomic.temporary_sibling(folder)  # a directory: torch has a temporary name of its own beside the file
        raw, packed = work / "torch.json", work / "packed.json.gz"
        try:
            work.mkdir()
            self._torch.export_chrome_trace(str(raw))
            if not _is_whole(raw):  # torch says so on stderr alone
                raise OSError(f"torch could not write its trace to {self._logs}: is that full, or read-only?")
            with open(raw, "rb") as source, gzip.open(packed, "wb", compresslevel=_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            atomic.fsync_file(packed)
            atomic.make_directory(folder)
            os.rename(packed, folder / f"rank_{self._mesh.rank}.json.gz")
            atomic.fsync_directory(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if self._mesh.is_main:
            report("wrote profile", path=str(folder))

    def _try(self, action: Callable[[], object]) -> None:
        """Do what may fail without harm to the run; warn once, and profile no more."""
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


def _is_whole(trace: Path) -> bool:
    """Return whether `trace` has the last field that torch writes, and the end of the object."""
    if not trace.is_file():
        return False
    with open(trace, "rb") as file:
        file.seek(max(0, trace.stat().st_size - 4096))
        end = file.read().rstrip()
    return b'"traceName"' in end and end.endswith(b"}")
