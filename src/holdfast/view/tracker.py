"""The interface of trackers, built in or the user's own: what a tracker gets to know of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
