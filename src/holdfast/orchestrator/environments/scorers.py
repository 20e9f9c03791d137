"""Scorers: compare a completion with the right answer, and give a reward between 0 and 1."""

from __future__ import annotations

import re
from collections.abc import Callable

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")

Scorer = Callable[[str, str], float]


def lcs_length(first: str, second: str) -> int:
    """Return the length of the longest common subsequence.

    Bit-parallel, one row of the dynamic program per big-integer operation (Hyyrö 2004,
    "Bit-parallel LCS-length computation revisited", eq. 4): bit i of `row` is 0 where position i of
    `first` adds one to the length.
    """
    if not first or not second:
        return 0
    positions: dict[str, int] = {}
    for index, character in enumerate(first):
        positions[character] = positions.get(character, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for character in second:
        matches = row & positions.get(character, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(first) - row.bit_count()


def lcs(completion: str, answer: str) -> float:
    """Return the longest common subsequence as a share of the longer text; 1 for equal texts."""
    longer = max(len(completion), len(answer))
    return lcs_length(completion, answer) / longer if longer else 1.0


def exact(completion: str, answer: str) -> float:
    """Return whether both are equal up to surrounding white space."""
    return float(completion.strip() == answer.strip())


def contains(completion: str, answer: str) -> float:
    """Return whether the answer occurs in the completion."""
    return float(answer.strip() in completion)


def number(completion: str, answer: str) -> float:
    """Return whether the last number in the completion equals the last in the answer."""
    given, right = _last_number(completion), _last_number(answer)
    return float(given is not None and given == right)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def regex_scorer(pattern: str) -> Scorer:
    """Return a scorer that compares the last match of `pattern` (its first group, if any) with the answer.

    Raises:
        re.error: the pattern is not a regular expression.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def score(completion: str, answer: str) -> float:
        matches = list(compiled.finditer(completion))
        if not matches:
            return 0.0
        found = matches[-1][1] if compiled.groups else matches[-1][0]
        return exact(found or "", answer)

    return score


SCORERS: dict[str, Scorer] = {"exact": exact, "contains": contains, "lcs": lcs, "number": number}
