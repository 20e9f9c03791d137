"""With this directory on PYTHONPATH, every inference server that any process starts is the stub engine."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_ENGINE = Path(__file__).parents[1] / "stub_engine.py"


class StubEngineFinder(MetaPathFinder):
    """Finds `serve` of the stub engine where the command imports that of vLLM."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "holdfast.inference.server":
            return None
        sys.path.append(str(_ENGINE.parents[2]))
        return spec_from_file_location(fullname, _ENGINE)


sys.meta_path.insert(0, StubEngineFinder())
