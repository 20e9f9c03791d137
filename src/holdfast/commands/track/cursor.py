"""How far one tracker has come with a run: a small file in the run directory, `tracking/<tracker>.json`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.shared.errors import RunDirError
from holdfast.shared.files import durable, lock
from holdfast.shared.files.run_dir import RunDir


class _State(msgspec.Struct):
    run_id: str
    history: int = 1
    rewinds: int = 0
    step: int = 0
    evaluated: list[int] = []
    alarms: dict[str, int] = {}


@dataclass
class Cursor:
    """Where a tracker goes on.

    Attributes:
        run_id: of the run that this is about.
        history: which of the ways that the run took is sent: 1, until it goes back behind what was sent.
        step: the last one that was sent and flushed.
        evaluated: steps whose evaluations beside training were sent.
        alarms: by attempt, how many of its alerts and warnings were sent.
    """

    path: Path
    _state: _State

    @classmethod
    def take(cls, run_dir: RunDir, tracker: str) -> Cursor:
        """Take the cursor for this process.

        Raises:
            RunDirError: another process sends to this tracker, or the cursor cannot be used.
        """
        path = run_dir.tracking / f"{label_of(tracker)}.json"
        durable.make_directory(path.parent)
        if (holder := lock.take(path.with_suffix(".lock"))) is not None:
            raise RunDirError(
                f"{run_dir.path} is being sent to {tracker} already ({holder}): the run itself does, or another `track`"
            )
        run_id, rewinds = run_dir.run_id(), run_dir.rewinds()
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except FileNotFoundError:
            state = _State(run_id, rewinds=len(rewinds))
        except msgspec.DecodeError as error:
            raise RunDirError(f"{path} is damaged: {error}. Without it everything is sent again: remove it.") from None
        if state.run_id != run_id:
            state = _State(run_id, rewinds=len(rewinds))
        if any(step < state.step for step in rewinds[state.rewinds :]):
            # No tracker takes back what it has: the new way begins a run of its own there, with the steps before.
            state.history, state.step, state.evaluated = len(rewinds) + 1, 0, []
        state.rewinds = len(rewinds)
        return cls(path, state)

    @property
    def run_id(self) -> str:
        """The id under which the tracker knows the run."""
        return self._state.run_id if self.history == 1 else f"{self._state.run_id}-{self.history}"

    @property
    def history(self) -> int:
        """See above."""
        return self._state.history

    @property
    def step(self) -> int:
        """See above."""
        return self._state.step

    @property
    def evaluated(self) -> list[int]:
        """See above."""
        return self._state.evaluated

    @property
    def alarms(self) -> dict[str, int]:
        """See above."""
        return self._state.alarms

    def begin_anew(self) -> None:
        """Know nothing as sent that is no step."""
        self._state.evaluated, self._state.alarms = [], {}

    def write(self, step: int) -> None:
        """Note that everything up to `step` is sent, and what else was added to the attributes."""
        self._state.step = step
        durable.write_file(self.path, msgspec.json.encode(self._state))


def label_of(tracker: str) -> str:
    """Return the part of file names that stands for a tracker: `module:Class` has a colon, and dots."""
    return re.sub(r"\W", "_", tracker)
