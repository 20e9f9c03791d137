"""A request to stop, by a signal, that all ranks of a machine see: they save the current step first. And the end of a
run whose metric does not improve any more.

Ranks are forked from one process, so they share a page of memory. A scheduler may signal any of the processes.
"""

from __future__ import annotations

import functools
import mmap
import signal
import struct
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast.errors import nearest
from holdfast.process.events import report
from holdfast.run.checkpoints import BestMetric
from holdfast.run.metrics import plain_value
from holdfast.run.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.config.training import StopConfig
    from holdfast.trainer.mesh import Mesh

_TIME = struct.Struct("d")
SIGNALS = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGUSR2: signal.SIGINT}
"""The signal that ranks act on, by the signal that comes. They ignore SIGINT, which a terminal sends to all processes:
the launcher sends SIGUSR2 instead."""


class StopRequest:
    """The signal that asked to stop, shared by a process and its forks."""

    @functools.cached_property
    def _memory(self) -> mmap.mmap:
        return mmap.mmap(-1, 1 + _TIME.size)

    def listen(self) -> None:
        """Handle `SIGNALS` in this process and its forks. Call before the fork."""
        _ = self._memory
        for number in SIGNALS:
            signal.signal(number, lambda received, _: self.ask(SIGNALS[signal.Signals(received)]))

    def ask(self, number: int) -> None:
        """Ask all ranks to stop, as signal `number` does. The grace period counts from the first one except SIGINT."""
        if self._memory[0] in (0, signal.SIGINT):
            _TIME.pack_into(self._memory, 1, time.monotonic())
        elif number == signal.SIGINT:
            return  # somebody waits with a deadline
        self._memory[0] = number

    def signal_number(self) -> int:
        """Return the signal that asked to stop, or 0."""
        return self._memory[0]

    def asked_s(self) -> float:
        """Return the time of the first signal by the monotonic clock; without a signal, now."""
        return _TIME.unpack_from(self._memory, 1)[0] if self._memory[0] else time.monotonic()


STOP_REQUEST = StopRequest()
"""The request of this process and its forks."""


RARE = ("val/", "eval/")
"""Beginnings of metrics that few steps have."""


class EarlyStopping:
    """Decides whether the run ends before its last step. Rank 0 decides for all, from the lines of `metrics.jsonl`: a
    resumed run has the same lines, and decides the same. `history`: lines of the steps before; only rank 0 needs them.
    """

    def __init__(
        self, config: StopConfig | None, run_dir: RunDir, mesh: Mesh, *, history: Iterable[Mapping[str, float]]
    ) -> None:
        self._config, self._run_dir, self._mesh = config, run_dir, mesh
        self._metric = BestMetric.parse(config.metric) if config is not None else None
        self._best: float | None = None
        self._waited = 0
        self._has_warned = False
        for line in history:
            self._add(line)

    def _add(self, metrics: Mapping[str, float]) -> None:
        assert self._metric is not None
        value = metrics.get(self._metric.name)
        value = plain_value(value) if value is not None else None  # as a resumed run reads it
        if value is None:  # not measured at this step, or not finite
            return
        sign = 1 if self._metric.lower_is_better else -1
        if self._best is None or sign * value < sign * self._best:
            self._best, self._waited = value, 0
        else:
            self._waited += 1

    def has_ended(self, step: int) -> bool:
        """Whether the run ended at `step` already, before it was killed. A note of a later step goes. Collective."""
        ended = self._mesh.is_main and self._run_dir.early_end() == step
        if self._mesh.is_main and not ended:
            self._run_dir.note_early_end(None)
        return bool(self._mesh.max({"ended": float(ended)})["ended"])

    def end(self, step: int, reason: str) -> bool:
        """Return whether a hook has a reason to end the run with this step, and note that."""
        if reason and self._mesh.is_main:
            self._run_dir.note_early_end(step, by="hooks")
            report(f"early end: {reason}", step=step)
        return bool(reason)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the run ends with this step, and note that before the step is saved. Collective."""
        if self._config is None or self._metric is None:
            return False
        if self._mesh.is_main:
            self._add(metrics)
            self._check_name(step, metrics)
        ends = self._mesh.is_main and self._metric.name in metrics and self._waited >= self._config.patience
        if ends:
            self._run_dir.note_early_end(step)
            report(
                f"early end: {self._metric.name} has not been better than {self._best:.6g} for {self._waited} values",
                step=step,
            )
        return bool(self._mesh.max({"ends": float(ends)})["ends"])

    def _check_name(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once if a step lacks the metric, which may be misspelt, unless few steps have it."""
        assert self._metric is not None
        name = self._metric.name
        if name not in metrics and not name.startswith(RARE) and not self._has_warned:
            report(
                f"WARNING: step {step} has no metric '{name}' (stop.metric) to end the run by.{nearest(name, metrics)}"
            )
            self._has_warned = True
