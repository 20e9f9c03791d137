"""Copies committed checkpoints to a store in the background, one at a time."""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import CheckpointError, StorageError, is_storage_failure
from holdfast.process.imports import UPLOAD_THREAD
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run.checkpoints import Retention
from holdfast.run.run_dir import RunDir

CLOSE_S = 4200.0
"""How long the end of a run waits for uploads, unless told otherwise: stores can fail for an hour."""
_GIVE_UP_S = 10.0
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_LONGEST_LAST_PAUSE_S = 10.0
"""Between tries when the run ends, and somebody waits."""
_log = logging.getLogger("holdfast.remote")


@dataclass(frozen=True)
class _Upload:
    directory: Path
    step: int
    weights: tuple[Path, ...]


class Uploader:
    """A thread that uploads checkpoints in the order they are submitted, and prunes the store after each.

    Uploads that fail for now are tried again, with growing pauses, until the run ends. A waiting upload is not the only
    copy, so retention may remove its checkpoint.

    Used by the one process that commits checkpoints.

    Args:
        remote: where to; no other thread may use it.
        retention: which steps are removed there; the newest never is.
        protected: steps to keep there, such as the step that the run was resumed from.
        older_weights: how many versions of weights before its own a step needs; others are removed.
        run_dir: of the run whose identity is kept beside its steps; unset: nobody's.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        *,
        retention: Retention | None = None,
        protected: Collection[int] = (),
        older_weights: int = 0,
        run_dir: RunDir | None = None,
    ) -> None:
        self._remote = remote
        self._run_dir = run_dir
        self._retention = retention or Retention()
        self._protected = frozenset(protected)
        self._older_weights = older_weights
        self._changed = threading.Condition()
        self._jobs: deque[_Upload] = deque()
        self._current: _Upload | None = None
        self._failure: Exception | None = None
        self._refusal: Exception | None = None  # of the upload that waits to be tried again
        self._num_tries = 0
        self._has_uploaded = False
        self._is_closed = False
        self._is_given_up = False
        self._is_cleared = False
        # A daemon: a dead network must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=UPLOAD_THREAD, daemon=True)
        self._thread.start()

    def submit(self, directory: Path, step: int, *, weights: Sequence[Path] = ()) -> None:
        """Upload the checkpoint of `step`, with `weights`, after those submitted before; return at once."""
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the uploader is closed")
            self._jobs.append(_Upload(directory, step, tuple(weights)))
            if len(self._jobs) > 1:
                steps = ", ".join(str(job.step) for job in self._jobs)
                _log.warning("uploads are slower than saves: steps %s wait", steps)
            self._changed.notify_all()

    def release(self, step: int) -> bool:
        """Return whether the checkpoint of `step` may be removed here: no upload reads it, now or later."""
        with self._changed:
            if self._current is not None and self._current.step == step:
                return False
            # Given up rather than waited for: a slow store must not fill the disk here.
            waiting = [job for job in self._jobs if job.step != step]
            if len(waiting) < len(self._jobs):
                _log.warning("step %d is not uploaded: retention removes it before its turn came", step)
                self._jobs = deque(waiting)
                self._changed.notify_all()
            return True

    def poll(self) -> None:
        """Raise the first failure since the last call that will not be tried again; all are logged. Such failures are a
        damaged checkpoint, and a store that refuses the very first upload. Raise CheckpointError, with URL, operation
        and reason."""
        with self._changed:
            failure, self._failure = self._failure, None
        if isinstance(failure, CheckpointError):
            raise failure
        if failure is not None:  # such as a file of this machine that is gone
            raise CheckpointError(str(failure)) from failure

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted is uploaded or has failed for good; return whether that came in time. Raise
        CheckpointError if an upload failed."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._jobs and self._current is None, timeout_s)
        self.poll()
        return done

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for the uploads, tried again meanwhile, and end the thread; uploads that take longer are given up. Raise
        CheckpointError, with the steps that are on this machine only, if an upload failed or was given up."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            waiting = ", ".join(str(job.step) for job in (self._current, *self._jobs) if job)
        if waiting:
            _log.info(
                "waiting for the upload of step %s to %s, for at most %.0f s", waiting, self._remote.url, timeout_s
            )
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                jobs = [job for job in (self._current, *self._jobs) if job]
                self._jobs.clear()
                self._is_given_up = True
                reason = f" ({self._refusal})" if self._refusal else ""
                self._changed.notify_all()
            # Outside of the lock, which the thread needs to end.
            self._remote.abort()
            # Bounded: a call that hangs in the kernel cannot be aborted; the thread is a daemon.
            self._thread.join(_GIVE_UP_S)
            steps = ", ".join(str(job.step) for job in jobs)
            raise CheckpointError(
                f"{self._remote.url}: uploading step {steps} was given up after {timeout_s:.0f} s{reason}. "
                f"The checkpoint is whole in {jobs[0].directory.parent}; a resume from there uploads it."
                if jobs
                else f"{self._remote.url}: pruning was given up after {timeout_s:.0f} s; all steps are uploaded."
            )
        self.poll()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                self._current = job = self._jobs.popleft()
            failure = self._failure_of(job)
            with self._changed:
                self._current = None
                comes_again = failure is not None and self._will_try_again(failure)
                self._refusal = failure if comes_again else None
                if comes_again:
                    # Back before the pause, whose wait lets the lock go: retention may take it from there.
                    self._jobs.appendleft(job)
                    self._pause()
                else:
                    self._num_tries = 0
                    self._failure = self._failure or failure
                    self._changed.notify_all()

    def _will_try_again(self, failure: Exception) -> bool:
        if self._is_given_up:
            return False
        if not isinstance(failure, StorageError):
            return is_storage_failure(failure)  # of this machine, which cannot read the checkpoint now
        # A refusal from the beginning is a mistake to correct; later, somebody may renew the credentials.
        return failure.may_pass or (self._has_uploaded and not self._is_closed)

    def _pause(self) -> None:
        """Wait before the next try; shorter when the run ends meanwhile. Called with the lock."""
        was_closed = self._is_closed
        longest_s = _LONGEST_LAST_PAUSE_S if was_closed else _LONGEST_PAUSE_S
        pause_s = min(longest_s, _FIRST_PAUSE_S * 2**self._num_tries)
        self._num_tries += 1
        # Ends early where the run ends: its last tries come faster.
        self._changed.wait_for(lambda: self._is_given_up or self._is_closed != was_closed, pause_s)
        if self._is_closed != was_closed:
            self._num_tries = 0

    def _failure_of(self, job: _Upload) -> Exception | None:
        started = time.monotonic()
        try:
            if not job.directory.exists():
                _log.warning("step %d is not uploaded: %s was removed meanwhile", job.step, job.directory)
                return None
            self._write_identity()  # first: another machine takes a step without it for a run that begins today
            if self._remote.upload(job.directory, job.step, weights=job.weights):
                _log.info("uploaded step %d to %s in %.1f s", job.step, self._remote.url, time.monotonic() - started)
            self._write_identity()  # trackers have come further
            self._has_uploaded = True
            protected = self._protected | {job.step}
            removed = self._remote.apply_retention(
                self._retention, protected=protected, older_weights=self._older_weights
            )
            if removed:
                _log.info("removed steps %s from %s", ", ".join(map(str, removed)), self._remote.url)
            if not self._is_cleared:
                for name in self._remote.clear_leftovers():
                    _log.info("removed %s/%s: it was never committed", self._remote.url, name)
                self._is_cleared = True
        except Exception as error:  # noqa: BLE001 - raised by the next call
            _log.error("uploading step %d failed: %s", job.step, error)
            self._is_cleared = False  # it may have left parts of a file
            return error
        return None

    def _write_identity(self) -> None:
        if self._run_dir is not None:
            self._remote.write_identity(self._run_dir)
