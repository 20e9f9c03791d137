"""What a tracker is: the one interface behind which the built-in ones and the user's stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
