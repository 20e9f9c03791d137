"""docs/guarantees.md as the tests read it: its claims, and the footnotes that name a test for each."""

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "guarantees.md"
EXEMPT = {"Measured", "Tests"}
"""Sections without claims of their own: the first names commands, the second holds the footnotes."""
_NOT_TRIED = "not tried"
_NOTE = re.compile(r"\[\^([\w-]+)\]")
_DEFINITION = re.compile(r"^\[\^([\w-]+)\]:((?:.*\n)(?:    .*\n)*)", re.MULTILINE)
_NAMED = re.compile(r"\b(test_\w+\.py)(?:::(test_\w+))?")


@cache
def functions() -> dict[str, set[str]]:
    """Return the names of all tests, by the name of their file."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert path.name not in found, f"two files are called {path.name}"
        tree = ast.parse(path.read_text())
        found[path.name] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return found


def named_tests(text: str) -> Iterator[str]:
    """Give every test or file of tests that a text names, as `test_x.py::test_y` or `test_x.py`."""
    for match in _NAMED.finditer(text):
        yield match[0]


def exists(name: str) -> bool:
    file, _, function = name.partition("::")
    return file in functions() and (not function or function in functions()[file])


def footnotes(page: str) -> dict[str, list[str]]:
    """Return the tests of every footnote of a page, by its name."""
    return {match[1]: list(named_tests(match[2])) for match in _DEFINITION.finditer(page)}


def claims(page: str) -> Iterator[str]:
    """Give every row of a table and every sentence, but for those of exempt sections, headings and fenced blocks."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        if title in EXEMPT:
            continue
        paragraphs = [text.strip() for text in re.split(r"\n\s*\n|\n(?=- )", body) if text.strip()]
        for paragraph, following in itertools.zip_longest(paragraphs, paragraphs[1:], fillvalue=""):
            lines = paragraph.split("\n")
            if lines[0].startswith("|"):
                yield from lines[2:]
                continue
            *sentences, last = _sentences(" ".join(line.strip() for line in lines))
            yield from sentences
            if not (last.endswith(":") and following.startswith("|")):  # else it is the heading of a table
                yield last


def _sentences(text: str) -> Iterator[str]:
    """Give the sentences of a text, each with the footnotes behind its end."""
    text = re.sub(r"([.:!?])((?:\[\^[\w-]+\])+)", r"\2\1", text)
    code = re.findall(r"`[^`]*`", text)
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9*`\[])", re.sub(r"`[^`]*`", "`\0`", text)):
        number = sentence.count("`\0`")
        for span in code[:number]:
            sentence = sentence.replace("`\0`", span, 1)
        code = code[number:]
        yield sentence


def tests_of(claim: str, notes: dict[str, list[str]]) -> list[str]:
    """Return the tests that a claim names, itself or by its footnotes."""
    return [*named_tests(claim), *(test for name in _NOTE.findall(claim) for test in notes.get(name, []))]


def is_not_tried(claim: str) -> bool:
    """Whether a sentence says of itself that it was not tried."""
    return _NOT_TRIED in claim


def notes_used(page: str) -> set[str]:
    """Return the names of the footnotes that the text of a page refers to."""
    return set(_NOTE.findall(_DEFINITION.sub("", page)))


def defaults(page: str) -> Iterator[tuple[str, float]]:
    """Give every setting that is named with its default, a number in parentheses, behind it."""
    for name, value in re.findall(r"`(?:--)?([\w.-]+)` \((\d+)\)", page):
        yield name.replace("-", "_"), float(value)
