"""Imported at the start of every interpreter, by `_coverage_marks.pth`: loads what is measured with its marks. They lie
in a file that all processes map, so those of a process that was killed, forked or that left by `os._exit` stay."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from types import CodeType

marks = None
"""The mapped file: one byte for each point, of all modules."""


def _open(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Map the marks; return size, time of change and marked code of every module by its path."""
    import json
    import mmap

    global marks
    # The map keeps a descriptor; that of a stream which is closed is not for it.
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 3:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    with (folder / "marks").open("r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)
    for descriptor in taken:
        os.close(descriptor)
    return json.loads((folder / "index.json").read_bytes())["loaded"]


def _unchanged(modules: dict[str, tuple[int, int, str]], path: str) -> str | None:
    """Return where the marked code of a module is, if its source is still what was marked."""
    size, mtime_ns, code = modules.get(path, (0, 0, ""))
    status = os.stat(path)  # noqa: PTH116 - every interpreter starts with this module, most need no pathlib
    return code if (status.st_size, status.st_mtime_ns) == (size, mtime_ns) else None


def _install(directory: str) -> None:
    # Those of `_open` too: a package that is measured shall not be seen to import them.
    import json  # noqa: F401
    import marshal
    import mmap  # noqa: F401
    import sys
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
    from pathlib import Path

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
            if name.split(".", 1)[0] != "holdfast":
                return None
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.origin is None or type(spec.loader) is not SourceFileLoader:
                return spec
            if marks is None:
                self._modules = _open(folder)
            code = _unchanged(self._modules, spec.origin)
            if code is not None:
                spec.loader = Loader(name, spec.origin, code)
            return spec

    if (folder / "index.json").is_file():
        sys.meta_path.insert(0, Finder())


if _directory := os.environ.get("COVERAGE_MARKS"):
    _install(_directory)
