"""What no test may do: write into the repository. A lane compares what lies there before and after."""

import os
from pathlib import Path

from tests.lanes.durations import ROOT

_OWN = {".git", ".venv", "__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".import_linter_cache",
        ".coverage_marks"}  # fmt: skip
"""Directories that the lanes, git and the linters write themselves."""
_OWN_FILES = (".durations.", ".skipped.")

State = dict[str, tuple[int, int]]


def state(root: Path = ROOT) -> State:
    """Return size and time of change of every file of the repository, ignored ones included, by its path."""
    found: State = {}
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _OWN]
        for path in (Path(directory, name) for name in files if not name.startswith(_OWN_FILES)):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            found[str(path.relative_to(root))] = (status.st_size, status.st_mtime_ns)
    return found


def differing(before: State, after: State) -> list[str]:
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
