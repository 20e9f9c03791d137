"""Where the tests of a package are: `tests/unit` has the directories of `src/holdfast`."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT

PROJECT = "project"
"""Tests of what is no package: docs, examples, the tools of the tests."""


def directories(home: Path, pattern: str) -> set[str]:
    """Return the directories below `home` with files of that pattern."""
    return {str(path.parent.relative_to(home)) for path in home.rglob(pattern) if path.name != "__init__.py"}


def test_unit_tests_lie_in_directories_of_the_packages() -> None:
    packages = directories(ROOT / "src" / "holdfast", "*.py")
    tested = directories(ROOT / "tests" / "unit", "test_*.py") - {PROJECT}
    assert tested == packages, sorted(tested ^ packages)
