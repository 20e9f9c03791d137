"""Measures scripts that are run by path, by interpreters that see neither the virtual environment nor its variables."""

from __future__ import annotations

import os
from pathlib import Path

_STARTUP = Path(__file__).parent / "startup"


def with_marks(script: Path, into: Path) -> Path:
    """Return a script in `into` that runs `script` with its marks; `script` itself where nothing is measured."""
    directory = os.environ.get("COVERAGE_MARKS")
    if not directory:
        return script
    wrapper = into / script.name
    wrapper.write_text(
        f"import sys\nsys.path.insert(0, {str(_STARTUP)!r})\nimport _coverage_marks\ndel sys.path[0]\n"
        f"exec(_coverage_marks.code_of_script({directory!r}, {str(script)!r}))\n"
    )
    return wrapper
