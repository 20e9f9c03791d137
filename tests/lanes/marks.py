"""Which lane a test belongs to, by the marks that name what it needs: nightly are those that need an engine, commands,
ranks, pages, TRL or seconds of real time; slurm and gpu are run by hand."""

from collections.abc import Iterable
from typing import Literal, get_args

Lane = Literal["everyday", "nightly", "slurm", "gpu"]
LANES: tuple[Lane, ...] = get_args(Lane)
BY_HAND: dict[Lane, str] = {
    "slurm": "uv run pytest --lane slurm tests",
    "gpu": "uv run --with pytest python -m tests.gpu",
}
"""Lanes that no script of `.ci` runs, and their commands."""
RESOURCES = frozenset({"engine", "launch", "ranks", "docs", "clock", "trl"})
"""A test with one of these marks runs at night."""
EVERYDAY = "everyday"
"""The mark of a test that needs a resource and runs every day all the same."""


def lane_of(marks: Iterable[str]) -> Lane:
    """Return the lane of a test with these marks; names of other marks do not matter."""
    names = set(marks)
    if "gpu" in names:
        return "gpu"
    if "slurm" in names:
        return "slurm"
    return "nightly" if names & RESOURCES and EVERYDAY not in names else "everyday"


_running: frozenset[str] | None = None


def begin(marks: Iterable[str]) -> None:
    """Note the marks of the test that runs from here on."""
    global _running
    _running = frozenset(marks)


def require(resource: str) -> None:
    """Refuse a resource to a test without its mark; a program that is not a test may have it. Raises `AssertionError`:
    the test is not marked."""
    assert resource in RESOURCES, resource
    if _running is not None and resource not in _running:
        raise AssertionError(f"this test needs the resource `{resource}`: mark it, or it runs in the wrong lane")
