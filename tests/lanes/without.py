"""A process of tests that may not import some packages: it fails, and names who asked. Nor may what such a process
starts, unless the test that starts it is marked."""

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

HEAVY = ("torch", "transformers", "vllm")
STARTING_HEAVY = frozenset({"launch", "ranks", "engine"})
"""A test with one of these marks may start what imports them."""
_CHILDREN = f"{__file__.rpartition('/')[0]}/light_children"


class _Refusal:
    """Finds nothing, and raises for the packages that it refuses."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Leave all other packages to the finders behind this one."""
        if name.partition(".")[0] in self._packages and not _only_asks(name):
            raise AssertionError(
                f"a test of the light units imports {name}: move the test to tests/unit/trainer, or the import away; "
                "if a process imports it that the test starts, mark the test `launch`"
            )
        return None


def _only_asks(name: str) -> bool:
    """Whether `importlib.util.find_spec` asks for this package; where it asks for a module in it, it imports this."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
            return frame.f_locals.get("fullname") == name
        frame = frame.f_back
    return False


def refuse(packages: Iterable[str] = HEAVY) -> None:
    """Refuse packages from here on, and all that is in them. Raises `RuntimeError`: one of them is imported already, so
    nothing would notice another import."""
    if imported := sorted(sys.modules.keys() & set(packages)):
        raise RuntimeError(f"{', '.join(imported)} was imported before any test, say by a plugin: pytest -p no:NAME")
    sys.meta_path.insert(0, _Refusal(packages))  # type: ignore[arg-type] - a finder needs no base class


def refuse_to_children(marks: Iterable[str]) -> None:
    """Put on PYTHONPATH, or take from it, what refuses them to every Python that this process starts."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", _CHILDREN)]
    if STARTING_HEAVY.isdisjoint(marks):
        entries.insert(0, _CHILDREN)
    if entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    else:
        os.environ.pop("PYTHONPATH", None)
