"""The processes of one attempt as `watch` gets them, and the rules for restarting dead processes.

A storage that cannot be written (a full disk) does not count as a crash: everything that was committed is intact, so
the launcher waits for the storage.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config.training import TrainingCommand
from holdfast.errors import NOT_SAVED
from holdfast.launcher.cluster.cluster import Cluster, is_trainer
from holdfast.launcher.cluster.hosts import Host
from holdfast.launcher.liveness import Health
from holdfast.launcher.preflight import PlannedProcess
from holdfast.launcher.resume.attempt import Attempt
from holdfast.process.heartbeat import awake_s
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir

_FIRST_DELAY_S = 0.2
_LAST_DELAY_S = 10.0
# Exit codes of errors that were told: most would only come again.
_TOLD = (2, 3, NOT_SAVED)


class Restarts:
    """The allowance of every process: at most `limit` restarts within `window_s` seconds.

    Args:
        limit: 0: none is ever started again.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._failures: dict[str, tuple[str | None, int]] = {}
        self._stuck: dict[str, tuple[int, int]] = {}

    def comes_again(self, name: str, failure: str | None, *, step: int) -> bool:
        """Note a death of process `name`; return whether it died of the same `failure` before, at the same step.

        Args:
            failure: None where nothing but the death itself is known: it then counts as another one.
        """
        before, self._failures[name] = self._failures.get(name), (failure, step)
        return failure is not None and before == (failure, step)

    def delay_s(self, name: str, exit_code: int, *, stuck_at: int | None = None) -> float | None:
        """Return the seconds to wait before process `name` is started again; None: it is not.

        Deaths by a signal, crashes and a dead engine are worth another try. Errors that were told (bad input,
        numbers that broke) would only come again. A failed storage is not a crash: see `StorageBackoff`.

        Args:
            stuck_at: the step at which it came no further. That takes longer to notice than any window, so it may
                be started again `limit` times at the same step.
        """
        if exit_code in _TOLD:
            return None
        if stuck_at is not None:
            step, count = self._stuck.get(name, (stuck_at, 0))
            count = count if step == stuck_at else 0
            if count >= self.limit:
                return None
            self._stuck[name] = (stuck_at, count + 1)
            return _FIRST_DELAY_S
        self._stuck.pop(name, None)
        now = time.monotonic()
        times = self._times[name]
        while times and now - times[0] > self.window_s:
            times.popleft()
        if len(times) >= self.limit:
            return None
        times.append(now)
        return min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** (len(times) - 1))

    def used(self, name: str) -> int:
        """Restarts of `name` within the window, or at the step at which it is stuck."""
        return self._stuck[name][1] if name in self._stuck else len(self._times[name])

    def over(self, name: str) -> str:
        """Return what those of `used` were counted over."""
        return f" behind step {self._stuck[name][0]}" if name in self._stuck else f" in {self.window_s:g} s"


_STORAGE_FIRST_DELAY_S = 1.0
_STORAGE_LAST_DELAY_S = 30.0


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
        return min(left_s, _STORAGE_LAST_DELAY_S, _STORAGE_FIRST_DELAY_S * 2 ** (self._failures - 1))


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


EVALUATION = "evaluation"
"""Name of the process that evaluates what a trainer saves."""


@dataclass(frozen=True)
class Plan:
    """One attempt, ready to start.

    Attributes:
        commands: argv of every process, by name, in the order of starting.
        trainer: configuration of the trainer.
        paths: the resolved configurations.
        health: what to ask for the health of a process, by name.
        environments: variables of a process, by name, such as those that give it its GPUs.
        processes: what a dry run shows.
        hosts: where a process runs, by name; this machine where it is not named.
        node: which of several nodes with this run this one is.
    """

    attempt: Attempt
    commands: dict[str, list[str]]
    trainer: TrainingCommand
    paths: list[Path]
    health: dict[str, Health] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    processes: list[PlannedProcess] = field(default_factory=list)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    node: int = 0

    def work_of(self, name: str) -> Callable[[], bool]:
        """Return what says whether a process that has ended by itself did its work: code of users may end it before."""
        run_dir, last = self.attempt.run_dir, self.trainer.max_steps
        if name == EVALUATION:
            return lambda: True  # it alone knows what there was to do
        if is_trainer(name):
            return lambda: atomic.is_visible(run_dir.weights_of(last))
        return lambda: atomic.is_visible(run_dir.batch(last)) or last in run_dir.committed_steps()

    def file_name(self, name: str) -> str:
        """Name of a file of this node: nodes write into one directory."""
        return f"{name}_node_{self.node}" if self.node else name


@dataclass(frozen=True)
class Healing:
    """What keeps a run going whose processes die.

    Attributes:
        again: makes the plan that goes on with the run after its trainer died.
        restarts: the allowance of restarts after crashes.
        storage_backoff: how long the run waits for its storage.
        heartbeat_timeout_s: a process that is silent for this long is killed.
        cluster: where the processes have their places, which may get lost; None: on this machine.
        cluster_timeout_s: how long other places are waited for.
    """

    again: Callable[[], Plan]
    restarts: Restarts
    storage_backoff: StorageBackoff
    heartbeat_timeout_s: float
    cluster: Cluster | None = None
    cluster_timeout_s: float = 0.0
