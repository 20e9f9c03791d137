"""Scorers: the bit-parallel LCS against the textbook program, and the others on examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.orchestrator.env.jsonl import SCORERS, lcs, lcs_length, regex_scorer


def slow_lcs_length(first: str, second: str) -> int:
    """The dynamic program of every textbook."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first, start=1):
        for j, b in enumerate(second, start=1):
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if a == b else max(lengths[i - 1][j], lengths[i][j - 1])
    return lengths[-1][-1]


_texts = st.text(alphabet="abcé", max_size=80)


@given(_texts, _texts)
def test_lcs_equals_the_dynamic_program(first: str, second: str) -> None:
    assert lcs_length(first, second) == slow_lcs_length(first, second)


def test_lcs_on_examples() -> None:
    assert lcs_length("agcat", "gac") == 2
    assert lcs("abcd", "abcd") == 1.0
    assert lcs("abcd", "ad") == 0.5
    assert lcs("", "abcd") == 0.0
    assert lcs("", "") == 1.0


@pytest.mark.parametrize(
    ("scorer", "completion", "answer", "reward"),
    [
        ("exact", " 42\n", "42", 1.0),
        ("exact", "the 42", "42", 0.0),
        ("contains", "it is 42.", "42", 1.0),
        ("contains", "it is 43.", "42", 0.0),
        ("number", "6 x 7 is 42.0, surely", "42", 1.0),
        ("number", "42, no: 1,234.5", "1234.5", 1.0),
        ("number", "from 42 to 43", "42", 0.0),
        ("number", "no idea", "42", 0.0),
        ("number", "-3", "-3", 1.0),
        ("lcs", "ab", "abcd", 0.5),
    ],
)
def test_scorers(scorer: str, completion: str, answer: str, reward: float) -> None:
    assert SCORERS[scorer](completion, answer) == reward


def test_regex_compares_the_last_match() -> None:
    score = regex_scorer(r"answer: (\w+)")
    assert score("answer: no\nanswer: yes", "yes") == 1.0
    assert score("answer: yes\nanswer: no", "yes") == 0.0
    assert score("yes", "yes") == 0.0
    assert regex_scorer(r"\d+")("1 then 22", "22") == 1.0
