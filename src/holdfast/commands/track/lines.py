"""The lines of `metrics.jsonl` as they come, also while resumes replace the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

_MOST_LINES = 500


class Lines:
    """Reads the whole lines of a growing file; one that was replaced is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file_number = -1

    def new(self) -> list[tuple[int, dict[str, float]]]:
        """Return the steps that have come since the last call, some hundreds at most, and their numbers.

        Raises:
            OSError: the file cannot be read.
        """
        return list(self._new())

    def _new(self) -> Iterator[tuple[int, dict[str, float]]]:
        try:
            file = open(self._path, "rb")
        except FileNotFoundError:  # no step is trained yet
            return
        with file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._file_number:
                self._file_number, self._offset = number, 0
            file.seek(self._offset)
            for _ in range(_MOST_LINES):
                line = file.readline()
                if not line.endswith(b"\n"):  # half of it: it is read whole the next time
                    return
                self._offset += len(line)
                if (step := _parse(line)) is not None:
                    yield step


def _parse(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return step and numbers of a line; None of one that is damaged, which the next resume sets aside."""
    try:
        values = json.loads(line)
        step = int(values.pop("step"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return step, {name: value for name, value in values.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
