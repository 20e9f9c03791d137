"""Where the tests of a package are: `tests/unit` has the directories of `src/holdfast`."""

from __future__ import annotations

import re
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


def test_no_file_has_more_lines_than_the_rules_allow() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert not {path: number for path, number in lines.items() if number > 650}
    assert len(lines) <= 255


def test_bytes_that_are_not_utf8_count_as_damage_wherever_msgspec_reads() -> None:
    """msgspec raises a `UnicodeDecodeError` for them, which is not one of its own errors."""
    caught = re.compile(r"except [^\n]*msgspec\.(?:Decode|Msgspec)Error[^\n]*")
    lines = [line for path in (ROOT / "src").rglob("*.py") for line in caught.findall(path.read_text())]
    assert len(lines) > 10 and not [line for line in lines if not re.search("UnicodeDecodeError|ValueError", line)]
