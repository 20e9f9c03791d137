"""Where committed steps are kept: in the directory that they are committed in, or in a store besides.

A step is committed on this machine first, atomically; a storage takes it from there, behind the training, so a store
that is away costs no checkpoint. Another kind of store is one more class here, and one more line in
`holdfast.trainer.saving.open_storage`. Object stores of all makers are one kind: fsspec knows them by
their URLs. What a resume wants of a store is fetched before any rank starts: `holdfast.launcher.resume.remote`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.remote.uploader import CLOSE_S, Uploader
from holdfast.run.checkpoints import Retention
from holdfast.run.run_dir import RunDir


class Storage(Protocol):
    """Keeps the steps that rank 0 commits. Called on that rank alone, but for `close_s`.

    Attributes:
        close_s: how long the end of a run may wait for it, the same on all ranks; 0 where there is nothing to wait for.
    """

    close_s: float

    def publish(self, directory: Path) -> None:
        """Take the step committed in `directory`, and return at once. From the thread that commits."""
        ...

    def release(self, step: int) -> bool:
        """Whether the directory of `step` may be removed: it is not being read, nor will be after this call."""
        ...

    def poll(self) -> None:
        """Do nothing, or raise what has failed for good since the last call.

        Raises:
            CheckpointError: which step, where, and why.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Wait until everything published is kept; give up what is not in time.

        Raises:
            CheckpointError: what is on this machine only.
        """
        ...


class LocalStorage:
    """The directory of the commits itself: what is committed is kept.

    Args:
        close_s: that of rank 0's storage, on the other ranks of a run.
    """

    def __init__(self, *, close_s: float = 0.0) -> None:
        self.close_s = close_s

    def publish(self, directory: Path) -> None:
        """Leave the step where it is."""

    def release(self, step: int) -> bool:
        """Return that nobody reads the directory of `step`."""
        return True

    def poll(self) -> None:
        """Find no failure."""

    def close(self, timeout_s: float) -> None:
        """Wait for nothing."""


class ObjectStorage:
    """An object store, which a thread copies every step to; see `holdfast.remote`.

    Args:
        url: such as `s3://bucket/prefix`.
        retention: which steps are removed there.
        protected: steps to keep there, such as the one that the run was resumed from.
        older_weights: how many versions of published weights before its own a resume from a step needs.
        weights_of: where those of a version are; they are copied first.
        run_dir: of the run whose identity is kept beside its steps; unset: nobody's.

    Raises:
        ConfigError: the URL cannot be used, or its driver is not installed.
    """

    close_s = CLOSE_S

    def __init__(
        self,
        url: str,
        *,
        retention: Retention | None = None,
        protected: Collection[int] = (),
        older_weights: int = 0,
        weights_of: Callable[[int], Path] | None = None,
        run_dir: RunDir | None = None,
    ) -> None:
        self._older_weights = older_weights
        self._weights_of = weights_of
        self._uploader = Uploader(
            RemoteCheckpoints(url),
            retention=retention,
            protected=protected,
            older_weights=older_weights,
            run_dir=run_dir,
        )

    def publish(self, directory: Path) -> None:
        """Have the step uploaded after those before it; if the store has it already, nothing is sent."""
        step = int(directory.name.removeprefix("step_"))
        self._uploader.submit(directory, step, weights=self._weights_before(step))

    def _weights_before(self, step: int) -> Sequence[Path]:
        if self._weights_of is None:
            return ()
        versions = range(max(0, step - self._older_weights), step)
        return [path for path in map(self._weights_of, versions) if path.exists()]

    def release(self, step: int) -> bool:
        """Whether the upload of `step` is not under way; one that waits is given up for this."""
        return self._uploader.release(step)

    def poll(self) -> None:
        """Raise what will not be tried again, such as an upload that the store refuses."""
        self._uploader.poll()

    def close(self, timeout_s: float) -> None:
        """Wait for the uploads, tried again meanwhile."""
        self._uploader.close(timeout_s)
