"""Which checkpoints a run has, looked at again and again while others write and remove them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from holdfast.shared.errors import CheckpointError, ReadError
from holdfast.shared.files.durable import TEMPORARY_PREFIX
from holdfast.shared.files.manifest import MANIFEST_NAME, read_manifest

# Every look at a manifest is a question to the storage.
_LOOKED_AT_AGAIN = 3
_NAME = re.compile(rf"({re.escape(TEMPORARY_PREFIX)})?step_(\d+)")


@dataclass(frozen=True)
class Checkpoints:
    """What was found at one look.

    Attributes:
        good: the newest step whose manifest is whole.
        saved_unix_s: when that was committed.
        damaged: steps after `good` whose manifest is missing or damaged.
        unreadable: steps after `good` whose manifest the storage has not given yet.
        saving: the step that is written now, or was when its writer was killed.
        steps: all whole ones, ascending.
    """

    good: int | None = None
    saved_unix_s: float | None = None
    damaged: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    saving: int | None = None
    steps: tuple[int, ...] = ()


class CheckpointWatch:
    """Looks into a directory of checkpoints; reads each manifest once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, tuple[int, float | None]] = {}
        self.last = Checkpoints()

    def look(self) -> Checkpoints:
        """Return what is there now; the same as before where the directory cannot be read."""
        try:
            with os.scandir(self._directory) as entries:
                # fullmatch: removals and downloads put something behind the step.
                names = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
        except FileNotFoundError:
            names = []
        except OSError:
            return self.last
        there = sorted(int(match[2]) for match in names if not match[1])
        saving = [int(match[2]) for match in names if match[1]]
        newest = set(there[-_LOOKED_AT_AGAIN:])
        for step in there:
            if step in newest or step not in self._known:
                self._read(step)
        self._known = {step: self._known[step] for step in there if step in self._known}
        saved = {step: time for step, (_, time) in self._known.items() if time is not None}
        good = max(saved, default=None)
        others = [step for step in there if step not in saved and (good is None or step > good)]
        self.last = Checkpoints(
            good,
            None if good is None else saved[good],
            tuple(step for step in others if step in self._known),
            tuple(step for step in others if step not in self._known),
            max(saving, default=None),
            tuple(saved),
        )
        return self.last

    def _read(self, step: int) -> None:
        """Learn when `step` was committed, or that it is damaged; what is known stays where it cannot be read."""
        path = self._directory / f"step_{step}"
        try:
            changed = (path / MANIFEST_NAME).stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        except OSError:
            return
        known = self._known.get(step)
        if known is not None and known[0] == changed:
            return
        try:
            manifest = read_manifest(path)
            time = float(manifest.created_unix_s) if manifest.step == step else None
        except ReadError:
            return  # it may be read at the next look
        except CheckpointError:
            time = None
        self._known[step] = (changed, time)
