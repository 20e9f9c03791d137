"""docs/architecture.md is drawn from the code and leads through it; where tests are, and how long files may be."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages import architecture
from tests.pages.architecture import PAGE, House, Step, ways

WAYS = ways(PAGE.read_text())
STEPS = [step for way in WAYS for step in way]


def test_the_page_is_what_contracts_imports_and_docstrings_say() -> None:
    text = PAGE.read_text()
    assert text == architecture.page_with(text), "write it anew: uv run python -m tests.pages.architecture"


def test_every_import_between_rooms_leads_down() -> None:
    assert not [arrow for house in architecture.houses() for arrow in house.upward()]


def test_no_neighbours_import_one_another_in_a_circle() -> None:
    assert architecture.circles() == []


def test_every_package_has_its_floor() -> None:
    (house,) = architecture.houses()
    assert set(house.rooms) == architecture.children("holdfast") and len(architecture.contracts("forbidden")) == 3


def test_an_import_that_leads_up_or_sideways_is_noticed() -> None:
    house = House("x", [["a"], ["b", "c"]], {"a": ["b"], "b": ["c"], "c": ["a"]})
    assert house.upward() == ["x: b imports c", "x: c imports a"]


def test_the_page_tells_its_ways_in_lines_that_can_be_checked() -> None:
    assert len(STEPS) == architecture.numbered_lines(PAGE.read_text()) > 20


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.file}-{step.function}")
def test_every_function_of_a_way_is_where_the_page_says(step: Step) -> None:
    assert architecture.definition(step) is not None, f"docs/architecture.md:{step.line}"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"line-{way[0].line}")
def test_every_function_of_a_way_is_used_by_a_file_before_it(way: list[Step]) -> None:
    used = architecture.mentions(way[0].file)
    for step in way[1:]:
        name = step.function.rpartition(".")[2]
        assert name in used, f"docs/architecture.md:{step.line}: nothing before it uses {name}"
        used |= architecture.mentions(step.file)


def directories(home: Path, pattern: str) -> set[str]:
    """Return the directories below `home` with files of that pattern."""
    return {str(path.parent.relative_to(home)) for path in home.rglob(pattern) if path.name != "__init__.py"}


def test_unit_tests_lie_in_directories_of_the_packages() -> None:
    packages = directories(ROOT / "src" / "holdfast", "*.py")
    tested = directories(ROOT / "tests" / "unit", "test_*.py") - {"project"}  # of what is no package
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
