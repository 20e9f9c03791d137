"""Waiting for a storage that cannot be written: a full disk is no crash, and what was committed is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.clock import awake_s

_FIRST_DELAY_S = 1.0
_LAST_DELAY_S = 30.0


class StorageBackoff:
    """When to try again, and when to give up.

    Args:
        timeout_s: give up after failing for this long without training a new step; 0: at once.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._since_s = 0.0
        self._step = -1
        self._failures = 0

    def delay_s(self, step: int) -> float | None:
        """Return the seconds to wait before the next try, after a failure behind `step`; None: give up.

        The time begins anew when a step was trained for the first time since the last failure: room for
        something is found again and again, so waiting helps.
        """
        now = awake_s()
        if step > self._step:
            self._since_s, self._step, self._failures = now, step, 0
        left_s = self._since_s + self.timeout_s - now
        if left_s <= 0:
            return None
        self._failures += 1
        # Not beyond the limit: the last try is made when it is reached.
        return min(left_s, _LAST_DELAY_S, _FIRST_DELAY_S * 2 ** (self._failures - 1))


def fullest(run_dir: RunDir) -> tuple[Path, int]:
    """Return the directory of the run with the fewest free bytes, and how many: each may be a mount of its own."""
    free: dict[Path, int] = {}
    for path in (run_dir.path, run_dir.checkpoints, run_dir.rollouts, run_dir.weights):
        try:
            free[path] = shutil.disk_usage(path).free
        except OSError:  # not there, or its filesystem does not answer
            continue
    path = min(free, key=lambda candidate: free[candidate], default=run_dir.path)
    return path, free.get(path, 0)
