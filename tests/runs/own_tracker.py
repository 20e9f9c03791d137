"""Trackers as a user writes them: one keeps lines in a file, one is out of order while a file says so."""

import os
from collections.abc import Mapping

from holdfast import TrackedRun, Tracker


class InFile(Tracker):
    """Appends to `own.txt` of the run directory."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        self._file = open(run.directory / "own.txt", "a")
        lr = run.settings.get("optim.lr") or run.settings.get("trainer.optim.lr")
        self._file.write(f"begin {run.id} {run.name} attempt {run.attempt} after {after} lr {lr} {run.origin}\n")
        return after

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(f"step {step} {metrics['loss']}\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class OutOfOrder(InFile):
    """Fails, as the variable `TRACKER_FAILS` says: by an error (`raise`), a crash (`die`), or not at all."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        if os.environ.get("TRACKER_FAILS") == "die":
            os._exit(1)
        if os.environ.get("TRACKER_FAILS") == "raise":
            raise ConnectionError("the service is away")
        return super().begin(run, after=after)


class DiesOnce(InFile):
    """Dies when it is closed for the first time."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        self._died = run.directory / "died"
        return super().begin(run, after=after)

    def close(self) -> None:
        super().close()
        if not self._died.exists():
            self._died.touch()
            os._exit(1)


class Unfinished(Tracker):  # pyright: ignore[reportImplicitAbstractClass] - what a test is about
    """Lacks all methods."""


class NoTracker:
    """Is none."""
