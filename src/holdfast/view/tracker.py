"""Trackers, built in or the user's own: what a tracker gets to know of a run, and how `tracking.backends` names it."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.process.imports import load_function


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker sees it.

    Attributes:
        id: the run's id, the same after every restart. It gets the suffix `-2` if the run was resumed from an earlier
            step and trained other steps.
        history: the number of that suffix; 1 without a suffix.
        settings: the settings of the current attempt, by dotted key, without secrets.
        origin: the id and the step of the run from which this run was forked. After a resume from an earlier step: of
            this run. None otherwise.
    """

    id: str
    history: int
    name: str
    project: str
    tags: tuple[str, ...]
    directory: Path
    settings: Mapping[str, Any]
    attempt: int
    origin: str | None = None


class Tracker(ABC):
    """Base class of trackers: it gets the metrics of one run, step by step, in one thread of one process.

    Attributes:
        begins_anew: set it in `begin` if the tracker has nothing that was sent before. Evaluations and alerts are then
            sent again, too.
        takes_older_steps: whether `log` also stores evaluations, of a step before those logged already.
    """

    begins_anew = False
    takes_older_steps = False

    @abstractmethod
    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin a run, or continue it.

        Args:
            after: the last step that was logged and flushed before.

        Returns:
            The last step that the tracker has for good; the next step follows it. Return `after` unless the tracker
            knows better: the sender may have been killed after `log`.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step. Values that are not numbers are left out before."""

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Store the results of an evaluation of `step` (`sft`, `dpo`). Later steps may already be logged.

        Args:
            is_last: whether this is the last call.

        Returns:
            False: call it again after the next step.
        """
        if self.takes_older_steps:
            self.log(step, metrics)
        return True

    def log_answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Take a table of a few answers (`rl`), by field of `holdfast.view.answers`, right before `log` of the same
        step. The default stores nothing."""
        return

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        """Store an alert of the metrics (`alert`) or another warning (`warning`). The default stores nothing."""
        return

    @abstractmethod
    def flush(self) -> None:
        """Return when everything logged survives the end of this process, as far as the tracker can tell."""

    @abstractmethod
    def close(self) -> None:
        """Close the tracker, because the run has ended or was interrupted."""


BUILT_IN = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow", "trackio": "Trackio",
            "prometheus": "Prometheus"}  # fmt: skip
"""Name in `tracking.backends` -> class in `holdfast.view.backends`. The package to install has the same name."""
_INSTALLED = ("prometheus",)


def check_tracker(name: str, *, key: str) -> None:
    """Check that a tracker can be used, as far as that can be told without a network. Raise ConfigError if its package
    is not installed, or the user's class cannot be loaded."""
    if name not in BUILT_IN:
        load_tracker(name, key=key)
    elif name not in _INSTALLED and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"{key}: '{name}' needs the package {name}, which is not installed: "
            f"`uv sync --inexact --extra {name}` in a checkout, or `uv pip install 'holdfast[{name}]'`"
        )


def load_tracker(name: str, *, key: str) -> type[Tracker]:
    """Return the class of a tracker, built in or the user's. Raise ConfigError if the user's class cannot be loaded, or
    is not a tracker."""
    if name in BUILT_IN:
        from holdfast.view import backends

        return getattr(backends, BUILT_IN[name])
    found = load_function(name, key=key)
    if not inspect.isclass(found) or not issubclass(found, Tracker):
        raise ConfigError(
            f"{key}: '{name}' is not a tracker: derive a class from holdfast.Tracker, see docs/console.md"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: '{name}' lacks {', '.join(missing)}, see docs/console.md")
    return found
