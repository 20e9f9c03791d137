"""Run by every interpreter of the virtual environment at its start: loads what is measured with its marks.

`_coverage_marks.pth` imports this module; it does nothing unless COVERAGE_MARKS names a directory that
`python -m tests.coverage begin` has filled. Marks lie in a file that all processes map, so those of a process
that was killed, forked or that left by `os._exit` stay.
"""

from __future__ import annotations

import os

marks = None
"""The mapped file: one byte for each point, of all modules."""


def _install(directory: str) -> None:
    import json
    import marshal
    import mmap
    import sys
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
    from pathlib import Path
    from types import CodeType

    folder = Path(directory)

    class Loader(SourceFileLoader):
        """Takes the code with marks in place of what it would compile."""

        def __init__(self, name: str, path: str, code: str) -> None:
            super().__init__(name, path)
            self._code = Path(code)

        def get_code(self, fullname: str) -> CodeType:
            return marshal.loads(self._code.read_bytes())

    class Finder:
        """Finds the modules whose source is what `begin` has seen."""

        def __init__(self) -> None:
            self._modules: dict[str, tuple[int, int, str]] = {}

        def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
            global marks
            if name.split(".", 1)[0] != "holdfast":
                return None
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.origin is None or type(spec.loader) is not SourceFileLoader:
                return spec
            if marks is None:
                self._modules = json.loads((folder / "index.json").read_bytes())["loaded"]
                with (folder / "marks").open("r+b") as file:
                    marks = mmap.mmap(file.fileno(), 0)
            size, mtime_ns, code = self._modules.get(spec.origin, (0, 0, ""))
            status = Path(spec.origin).stat()
            if (status.st_size, status.st_mtime_ns) == (size, mtime_ns):
                spec.loader = Loader(name, spec.origin, code)
            return spec

    if (folder / "index.json").is_file():
        sys.meta_path.insert(0, Finder())


if _directory := os.environ.get("COVERAGE_MARKS"):
    _install(_directory)
