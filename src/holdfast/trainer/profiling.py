"""Profiles some steps of the trainer with torch's profiler, and writes one trace per rank.

The profiler warms up during the step before the first profiled step. Each rank writes its trace when the step after the
last profiled step begins. If profiling fails, the run continues without a profile.
"""

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

_LEVEL = 3  # traces shrink to about a tenth at any level, and high levels take minutes
_WRITING_S = 3600.0
"""A rank that writes longer counts as hung."""
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
        """Begin or end the profile, if it is time to. Collective at the end."""
        self._step = step
        if step == self._last + 1:
            self._end_of(self._last)
        if self._torch is not None:
            self._try(self._torch.step)
        elif self._first - 1 <= step <= self._last and not self._has_failed:
            self._try(self._start)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a context that names its block in the trace."""
        return record_function(name) if self._torch is not None else nullcontext()

    def end(self) -> None:
        """End the profile with the run. Collective."""
        if self._step == self._last:
            self._end_of(self._last)

    def stop(self, done: int, *, is_agreed: bool) -> None:
        """Write the profile up to step `done`; `is_agreed`: all ranks stop here, so that collectives are possible."""
        is_empty = is_agreed and done < self._first
        if self._first <= self._step <= self._last and not self._is_over and not is_empty:
            self._end_of(max(done, self._first), is_agreed=is_agreed)

    def _start(self) -> None:
        if self._mesh.device.type == "cpu":
            # Kineto reports missing GPUs as errors.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._mesh.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)  # untested: needs a GPU
        profiler = profile(activities=activities, schedule=self._action)
        # torch's profiler counts steps from 0: use the run's numbers.
        profiler.step_num, profiler.current_action = self._step, self._action(self._step)
        self._torch = profiler
        profiler.start()

    def _action(self, step: int) -> ProfilerAction:
        return ProfilerAction.WARMUP if step < self._first else ProfilerAction.RECORD

    def _end_of(self, last: int, *, is_agreed: bool = True) -> None:
        """Write the profile, which ends with step `last`. Collective if `is_agreed`."""
        self._is_over = True
        with meanwhile("writing the profile", bound_s=_WRITING_S), span("write_profile", step=last):
            self._try(lambda: self._write(self._logs / profile_name(self._first, last)))
            self._torch = None
            if is_agreed:
                self._mesh.barrier()  # within `meanwhile`: a fast rank waits for slow ranks

    def _write(self, folder: Path) -> None:
        """Write the trace of this rank into `folder`, durably and whole."""
        if self._torch is None:
            return
        self._torch.stop()  # first: stop recording even if the rest fails
        work = atomic.temporary_sibling(folder)  # torch writes a temporary file beside its file
        raw, packed = work / "torch.json", work / "packed.json.gz"
        try:
            work.mkdir()
            self._torch.export_chrome_trace(str(raw))
            if not _is_whole(raw):  # torch only prints an error
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
        """Run `action`; after a failure warn once, and stop profiling."""
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
    """Whether `trace` has the last field that torch writes, and the end of the object."""
    if not trace.is_file():
        return False
    with open(trace, "rb") as file:
        file.seek(max(0, trace.stat().st_size - 4096))
        end = file.read().rstrip()
    return b'"traceName"' in end and end.endswith(b"}")
