"""The tracker interface, the table of built-in trackers, and the loader of a user's own tracker class."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.process.imports import load_function


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker knows it.

    Attributes:
        id: the same through all restarts; with `-2` behind it after the run went back and took another way.
        history: 1, or that 2.
        name: for people.
        project: that it belongs to.
        directory: the run directory.
        settings: of the attempt that goes on, by dotted key, without secrets.
        attempt: its number.
        origin: the id of the run, and the step, that it was forked from; of an other way: of this run.
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
    """Takes the metrics of one run, of one step after the other. Everything is called by one thread of one process.

    Attributes:
        begins_anew: set by `begin`: nothing that was sent before is there, so evaluations and alerts come again, too.
    """

    begins_anew = False

    @abstractmethod
    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin with a run, or go on with it.

        Args:
            after: everything up to this step was logged and flushed before.

        Returns:
            The step up to which the tracker has everything, for good: what comes next is the step behind it. That is
            `after`, unless the tracker knows better: whoever sent it was killed between `log` and the note of that.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; those that are no numbers are left out."""

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Take what an evaluation beside training (`sft`, `dpo`) found of `step`; later steps may have been logged.

        A tracker that does not define this gets none.

        Args:
            is_last: no further step comes: it will not be asked again.

        Returns:
            Whether it has it; else it is asked again, behind the next step.
        """
        return True

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        """Take an alert or a warning of the run. A tracker that does not define this gets none.

        Args:
            kind: `alert`: of the metrics; `warning`: anything else.
            step: at which it was given, where that is known.
        """
        return

    @abstractmethod
    def flush(self) -> None:
        """Return when what was logged survives the end of this process, as far as the tracker can tell."""

    @abstractmethod
    def close(self) -> None:
        """End: nothing more comes now, be it that the run is over or that it is interrupted."""


# Name of the setting -> our class, the module that must be installed, and the extra that installs it.
BUILT_IN = {
    "tensorboard": ("tensorboard:TensorBoard", ("tensorboard",)),
    "wandb": ("wandb:WandB", ("wandb",)),
    "mlflow": ("mlflow:MLflow", ("mlflow",)),
    "trackio": ("trackio:Trackio", ("trackio",)),
}


def check_tracker(name: str, *, key: str) -> None:
    """Check that a tracker can be used, as far as that can be told without a network.

    Raises:
        ConfigError: its package is not installed, or the user's class cannot be loaded.
    """
    if name not in BUILT_IN:
        load_tracker(name, key=key)
        return
    for module in BUILT_IN[name][1]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{key}: '{name}' needs the package {module}, which is not installed: "
                f"`uv sync --inexact --extra {name}` in a checkout, or `uv pip install 'holdfast[{name}]'`"
            )


def load_tracker(name: str, *, key: str) -> type[Tracker]:
    """Return the class of a tracker, built in or the user's.

    Raises:
        ConfigError: the user's cannot be loaded, or is none.
    """
    if name in BUILT_IN:
        module, _, class_name = BUILT_IN[name][0].partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
    found = load_function(name, key=key)
    if not inspect.isclass(found) or not issubclass(found, Tracker):
        raise ConfigError(f"{key}: '{name}' is no tracker: derive a class from holdfast.Tracker, see docs/console.md")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: '{name}' lacks {', '.join(missing)}, see docs/console.md")
    return found


__all__ = ["BUILT_IN", "TrackedRun", "Tracker", "check_tracker", "load_tracker"]
