"""Files that others append to, read as they grow: `metrics.jsonl` and `events.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.shared.errors import is_storage_failure


class Tail:
    """Complete new lines of a growing file, as JSON objects; what is no object is left out.

    Attributes:
        replaced: how often another file, or a shorter one, was found in its place. It was read from its begin then.
        failed: whether the storage did not give the last look all that is there.
    """

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None
        if from_end and path.exists():
            status = path.stat()
            self._offset, self._file = status.st_size, (status.st_dev, status.st_ino)
        self.replaced = 0
        self.failed = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.failed = False
        try:
            yield from self._new_lines()
        except OSError as error:
            self.failed = True
            if not is_storage_failure(error):
                raise  # else they are read when the storage gives them again

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - ten times a second
        except FileNotFoundError:
            return
        identity = (status.st_dev, status.st_ino)
        is_other = self._file is not None and self._file != identity
        # A line that was in it may be cut off again: the storage was full.
        if is_other or status.st_size < self._offset:
            self._offset = 0
            self.replaced += 1
        self._file = identity
        # With the first line as well, a file that cannot be read says so.
        if status.st_size == self._offset and self._offset:
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                # Half a line: it is read whole at the next look, as the offset stays before it.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    value = json.loads(line)
                except ValueError:  # a full disk took the first part of a line only, or a bit has flipped
                    continue
                if isinstance(value, dict):
                    yield value
