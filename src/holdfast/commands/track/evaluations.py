"""Evaluations of `sft` and `dpo`, made beside the training: files of the run, not lines of `metrics.jsonl`."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from holdfast.orchestrator.evaluation.summary import summary_in
from holdfast.shared.errors import DataError
from holdfast.shared.files.run_dir import RunDir, number_of, numbered_paths

_PROGRAMS = ("sft", "dpo")
_log = logging.getLogger("holdfast")


class Evaluations:
    """What evaluations beside a run have found; none of an `rl` run, whose lines have it.

    Args:
        attempt: whose settings say what is trained.
    """

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = run_dir
        self._are_beside = any((run_dir.configs(attempt) / f"{name}.toml").exists() for name in _PROGRAMS)
        self._read: dict[int, dict[str, float]] = {}

    def but(self, sent: Collection[int]) -> list[tuple[int, dict[str, float]]]:
        """Return step and numbers of those that have ended and are not `sent`, in the order of steps."""
        for path in numbered_paths(self._run_dir.evaluations) if self._are_beside else []:
            step = number_of(path)
            if step in sent or step in self._read or not self._run_dir.is_evaluated(step):
                continue
            try:
                metrics = summary_in(path).metrics() | {"eval/version": float(step)}
            except DataError as error:
                _log.warning("an evaluation is not sent: %s", error)
                metrics = {}
            self._read[step] = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return [(step, metrics) for step, metrics in sorted(self._read.items()) if metrics and step not in sent]
