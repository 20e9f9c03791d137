"""Numbers as people write them: a table made by rule, read in both directions by `number` and `math_verify`."""

from __future__ import annotations

import asyncio
import itertools
import json
from decimal import Decimal
from pathlib import Path

import pytest

from holdfast.orchestrator.env.jsonl import Jsonl, Question, contains, exact
from holdfast.orchestrator.env.math_answers import MathAnswers
from holdfast.orchestrator.env.numbers import is_near, number, numbers_alone, plain, read_numbers

FORMS = [
    ["-5", "\u22125", "\\(-5\\)", "$-5$", "\\boxed{-5}", "-5.0", "-5,0", "\u20135"],
    ["5", "+5", "5.", "$5", "5,0", "05"],
    ["1000", "1,000", "1 000", "1\u00a0000", "1\u202f000", "1'000", "1\u2019000", "1e3", "10^3", "1000.00", "1{,}000"],
    ["12.5", "12,5", "12,50", "1.25e1", "1.25 \u00d7 10^1", "125/10", "12 1/2", "\\frac{25}{2}", "\\cfrac{25}2", "12½"],
    ["2.5", "2½", "2 ½", "2\\frac{1}{2}", "2\\,\\frac12", "5/2"], ["-0.5", "-½", "-\\tfrac{1}{2}"], ["1/3", "⅓"],
    ["1234.5", "1,234.5", "1.234,5", "1 234,5", "$1,234.50", "1\\,234.5", "1,234½"],
    ["12345", "12,345", "12 345", "12{,}345", "12,\\!345"],
    ["1234567", "1,234,567", "1.234.567", "12,34,567", "1 234 567"],
    ["0.00001", "1e-05", "1E-5", "10^{-5}", "10\u207b\u2075", ".00001", "1*10^-5"],
    ["2500", "2.5 \u00d7 10^3", "2.5 \\times 10^{3}", "2,5e3", "2.5\u00b710\u00b3"],
    ["-0.75", "-0,75", "\u22120,75", "-.75", "-3/4", "-\\frac34"], ["50 %", "50%", "50\\%", "50 percent"],
    ["0.123", "0,123"], ["3:45", "03:45"], ["(12,3)", "(12, 3)", "\\left(12,3\\right)", "(12;3)", "\\{12,3\\}"],
    ["[12,3]", "[12, 3]"], ["[12,3)", "[12, 3)"], ["(12,345)", "(12, 345)"], ["1, 2, 3", "1,2,3", "[1,2,3]"],
    ["10000000000000000000000", "1e22", "1e+22"], ["10000000000000000000001"], ["0.00000025", "2.5e-7", "2.5e-07"],
    ["0.00000026", "2.6e-7"],
]  # fmt: skip
"""Each line is one value; no two lines have the same value."""
RIGHT = [(given, answer) for line in FORMS for given, answer in itertools.product(line, line)]
WRONG = [pair for one, other in itertools.permutations(FORMS, 2) for pair in zip(one, other, strict=False)]
WRONG.remove(("(12,345)", "12345"))  # "twelve thousand (12,345)": a completion may write a number in brackets
SETS = [("{1, 2}", "{1,2}"), ("$\\{1,234\\}$", "\\{1,234\\}"), ("\\left\\{0,1\\right\\}", "$\\{0, 1\\}$")]
SETS += [("$(1,234)$", "(1,234)"), ("\\boxed{1,2}", "1.2"), ("\\text{1,2}", "1.2"), ("\\boxed{(12,345)}", "(12,345)")]
OR = [
    (text, "1 or 2")
    for text in ("1 or 2", "It is 2 and 1.", "\\boxed{1, 2}", "\\boxed{1 \\text{ or } 2}", "x = 1 or 2")
]
OR += [("1 or 2", "$1 or 2$"), ("$2$ or $1$", "$1 or 2$")]
OR += [("So x=1, x = 2", "x=1 or x=2"), ("$-3$ and $\\frac12$", "1/2 and -3"), ("$5 or $6", "$5 or $6")]
OR += [("1,000, 2, or 3", "2, 3 and 1000"), ("(1,2) or 5", "(1,2) or 5"), ("5 cups and 3 jars", "5 cups and 3 jars")]
NOT_BOTH = [("2", "1 or 2"), ("1", "1 or 2"), ("x=2", "x=1 or x=2"), ("1 or 3", "1 or 2"), ("2 or 3", "\\sqrt{2} or 3")]
NO_SETS = [("\\boxed{1.2}", "\\{1,2\\}"), ("0.1", "\\{0,1\\}"), ("1234", "\\{1,234\\}"), ("\\{1,2\\}", "1.2")]
NO_SETS += [("\\{1,2\\}", "\\{1,3\\}"), ("2", "{1,2}"), ("2, 1", "(1, 2)")]
OF_ONE_NUMBER = {form for line in FORMS for form in line if len(numbers_alone(form)) == 1 and ":" not in form}


@pytest.mark.parametrize("sentence", ["{}", "So 7 apples cost {}", "x = 3, then: {}\n"])
def test_each_form_of_the_right_value_is_right_and_each_other_value_is_wrong(sentence: str) -> None:
    assert len(RIGHT) > 400 and len(WRONG) > 400
    assert [pair for pair in RIGHT if not number(sentence.format(pair[0]), pair[1])] == []
    assert [pair for pair in WRONG if number(sentence.format(pair[0]), pair[1])] == []
    assert [number(sentence.format(given), answer) for given, answer in SETS + NO_SETS] == [1.0] * len(SETS) + [
        0.0
    ] * len(NO_SETS)


def test_math_verify_reads_numbers_by_the_same_rule() -> None:
    pytest.importorskip("math_verify")
    scorer = MathAnswers()

    async def score(pairs: list[tuple[str, str]]) -> list[tuple[str, str, float]]:
        return [(*pair, await scorer(*pair)) for pair in pairs]

    assert plain("x^2½ is 1½") == "x^2 1/2 is 3/2"
    right = [pair for pair in RIGHT if OF_ONE_NUMBER.issuperset(pair)]
    others = [("$\\frac{1}{15}$", "3:45"), ("\\boxed{5,12}", "12,5"), ("$6e$", "1e6"), ("0", "1 000"), ("5", "\u22125")]
    others += [("$\\begin{pmatrix}1\\\\2\\end{pmatrix}$", "(1,2)"), ("<think>12</think><answer>12.5</answer>", "12")]
    more = [("$\\frac{1}{2}$", "1/2"), ("12", "12 apples"), ("$x=5$", "5"), ("$(12, 3)$", "(12,3)"), ("0.5", "50 %")]
    more += [("<think>12</think><answer>12.5</answer>", "12.5"), ("计划的比例为13/28", "13/28")]
    more += [("\\{1,-1\\}", "\\{-1,1\\}"), ("\\boxed{\\{2,1\\}}", "\\{1,2\\}"), ("2, 1", "1, 2"), *SETS, *OR]
    said = asyncio.run(score(right + more + WRONG[::5] + others + NO_SETS + NOT_BOTH))
    assert [one for one in said[: len(right + more)] if one[2] != 1.0] == []
    assert [one for one in said[len(right + more) :] if one[2] != 0.0] == []


def test_numbers_beyond_all_floats_are_compared() -> None:
    long, other = (read_numbers("1" * 400 + end)[0] for end in ("/3", "2/3"))
    assert is_near(long, long) and not is_near(long, other) and number("1" * 400 + "/3", "5") == 0.0


@pytest.mark.parametrize(("text", "values"), [
    ("3-8", ["3", "8"]), ("COVID-19", ["19"]), ("2024-05-12", ["2024", "5", "12"]),
    ("in 2024 300 people", ["2024", "300"]), ("x^2 = 9", ["2", "9"]), ("1,234,56", ["1", "234", "56"]),
    ("1.5,2.5", ["1.5", "2.5"]), ("v1.2.3", ["1", "2", "3"]), ("5" * 4100 + "½", []),
    ("1e99999999999999999999 and 1/0, 10^5000000 %", []),
    ("5" * 5000, ["5" * 5000]), ("12/05/2024", ["12", "5", "2024"]),
])  # fmt: skip
def test_other_texts_are_read_as_they_stand(text: str, values: list[str]) -> None:
    assert [one.value for one in read_numbers(text)] == [Decimal(value) for value in values] and plain(text) == text


def test_scorers_of_texts_take_look_alike_characters_and_whole_numbers() -> None:
    assert exact(" \u22125\u00a0m\n", "-5 m") == 1.0 and exact("5.0", "5") == exact("021", "21") == 0.0
    found = [
        ("it is 1,000.", "1000"), ("\u22125!", "-5"), ("A 12", "A\u00a012"), ("agent 007", "007"), ("5, I say", "5"),
        ("for $5 million", "5 million"), ("3-5 km", "5 km"), ("1. 5 apples", "5 apples"), ("1.5 or 5 km", "5 km"),
        ("x = 5.", "x = 5"), ("1/2", "/"), ("May 5, 2024", "May 5"), ("v1.2.3", "1.2.3"), ("5 x 10^3 is", "x"),
    ]  # fmt: skip
    assert [pair for pair in found if not contains(*pair)] == []
    missed = [("15", "5"), ("-5", "5"), ("5.5", "5"), ("A 123", "A 12"), ("1007", "007"), ("7", "007"), ("10^5", "5")]
    missed += [(f"{number} apples", "5 apples") for number in ("1.5", "1,5", "-5", ".5", "\u22125", "1/5", "2 1/5")]
    missed += [("1,234 km", "234 km"), ("1 234 km", "234 km"), ("0.1.2.3", "1.2.3"), ("1.5 km", ".5 km")]
    missed += [
        ("at 15:30 h", "30 h"),
        ("x = 5 000", "x = 5"),
        ("x = 5e3", "x = 5"),
        ("x = 5 1/2", "x = 5"),
        ("x = 5½", "x = 5"),
    ]
    assert [pair for pair in missed if contains(*pair)] == []


def test_numbers_of_json_are_compared_by_value(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"prompt": "q", "answer": {value}}}\n' for value in ("42", "1e22", "2.5e-7", '"42"')))
    tasks = Jsonl(path).tasks
    assert [isinstance(task, Question) and task.has_numbers for task in tasks] == [True, True, True, False]
    for completions, task in zip(
        [["42.0", "42"], ["1e22", "1" + "0" * 22], ["2.5e-7", "0.00000025"], ["42"]], tasks, strict=True
    ):
        json.loads(task.answer)
        for scorer in ("exact", "number", "contains"):
            assert [asyncio.run(_score(Jsonl(path, scorer=scorer), task, text)) for text in completions] == [1.0] * len(
                completions
            )
    assert (
        asyncio.run(_score(Jsonl(path), tasks[0], "42 apples"))
        == asyncio.run(_score(Jsonl(path), tasks[3], "42.0"))
        == 0.0
    )


async def _score(environment: Jsonl, task: object, completion: str) -> float:
    from types import SimpleNamespace

    (score,) = await environment.score(task, [SimpleNamespace(completion=completion)])  # type: ignore[arg-type]
    return score.reward
