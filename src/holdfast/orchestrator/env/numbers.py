r"""Numbers as people write them. One rule reads right answers and completions.

    -5  +5  .5  1e-05  -$5          U+2212 is a sign, too; no letter, digit or bracket is directly before a sign
    2.5*10^3  10^3  2.5·10⁻⁷        times a power of ten, with any sign of multiplication, in LaTeX too
1,234  1,234.5  1,00,000        commas group thousands if three digits follow the last comma
1 000  1'000  5{,}000  5,\!000  so do spaces, apostrophes and LaTeX's spaces, if each group has three digits
12,5  0,123  1.234,5            another single comma is a decimal comma
(12,3)  {1,2}  1,2,3            in brackets, and between several commas, commas separate numbers
[1,2)                           two numbers in other brackets are another interval
1/2  1 1/2  1½  1\frac{1}{2}    a fraction, also after a whole number
3:45                            a time or ratio, which equals no number
50 %                            equals 50 and 0.5
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_FOLDED = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-") | dict.fromkeys("\u00a0\u2007\u2009\u202f", " ") | {"\u2019": "'"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR = "¼-¾⅐-⅞"
_POWER = r"10\s?(?:\^\s?\{?\s?(?P<%s>[-+]?\d+)\s?\}?|(?P<%s>[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.%])[-+](?=[\d.{_VULGAR}]|\\?[$€£¥₹]\d|\\[cdt]?frac|\\?[$€£¥₹]\.\d))?
    (?:\\?[$€£¥₹](?=[\d.]))?
    (?:
        (?<![\d.,])(?P<clock>\d+(?::\d+)+)
      | (?:(?<![a-zA-Z\d_.,^])(?P<mixed>\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\ |\\[ ,;!])?)?
        (?:(?P<vulgar>[{_VULGAR}])|\\[cdt]?frac\s?
            (?:\{{\s?(?P<top>-?\d+)\s?\}}|(?P<upper>\d))\s?(?:\{{\s?(?P<bottom>\d+)\s?\}}|(?P<lower>\d)))
      | (?<![\d.,/])(?:(?P<whole>\d+)\ )?(?P<over>\d+)\ ?/\ ?(?P<under>\d+)(?![\d/]|[.,]\d)
      | (?<![\d.,]){_POWER % ("power", "raised")}
      | (?:
            (?<![\d.,])(?P<grouped>
                [1-9]\d{{0,2}}(?P<gap>[ '_~]|,?\\!|\\[ ,;]|\{{,\}})\d{{3}}(?:(?P=gap)\d{{3}})*(?!\d)(?:[.,]\d+)?
            )
          | (?P<run>\d+(?:[.,]\d+)*)
          | (?P<part>\.\d+)
        )
        (?:[eE](?P<e>[-+]?\d+)(?!\w)|\s?(?:[\u00d7x*·⋅]|\\times|\\cdot)\s?{_POWER % ("ten", "tens")})?
    )
    (?P<percent>\s?(?:\\?%|percent\b))?
    """,
    re.VERBOSE,
)
_BRACKETED = re.compile(r"(?:[(\[]|\\\{|(?<![\w^\]}\\])\{)[-+\d.,;/\s]+(?:\\right)?\\?[)\]}]")
_ENCLOSED = re.compile(r"([(\[])[^()\[\]]+([)\]])")
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?")
_DOTTED_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}")
_BETWEEN = re.compile(r"(?:[\s,;()\[\]{}$€£¥₹.%]|percent|\\boxed|\\text|\\[()\[\]{} ,;!%]|\\left|\\right)*")
_NO_BLANKS = "\u0900-\u0fff\u3000-\u9fff\uac00-\ud7af\uff00-\uffef"  # India to Tibet; China, Japan and Korea
_BEFORE, _BEHIND = re.compile(rf"(?<=[>{_NO_BLANKS}])(?=[-+]?\.?\d)"), re.compile(rf"(?<=\d)(?=[<{_NO_BLANKS}])")
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?|-?\d+/\d+|-?\\[cdt]?frac.*")
_MOST_DIGITS, _MOST_EXPONENT = 4000, 900_000  # Python refuses integers of more digits, and Decimal larger exponents


@dataclass(frozen=True)
class Number:
    """A number in a text.

    Attributes:
        value: a time or ratio is a tuple.
        is_percent: a percent sign follows.
        start, end: the place of the number in the text, without the percent sign.
    """

    value: Decimal | Fraction | tuple[int, ...]
    is_percent: bool
    start: int
    end: int


def fold(text: str) -> str:
    """Return `text` with plain minus signs, spaces and apostrophes; the length stays."""
    return text.translate(_FOLDED)


def read_numbers(text: str, *, of_point: bool = False) -> list[Number]:
    """Return the numbers of a text, in order. `of_point`: the right answer is in brackets. Then in brackets all commas
    separate numbers."""
    text = fold(text)
    bracketed = [found.span() for found in _BRACKETED.finditer(text)]
    numbers = []
    for found in _NUMBER.finditer(text):
        in_brackets = any(start <= found.start() < end for start, end in bracketed)
        try:
            numbers += _read(found, in_brackets=in_brackets, of_point=of_point)
        except (InvalidOperation, ValueError, ZeroDivisionError):  # beyond any exponent or length; a zero below
            continue
    return numbers


def numbers_alone(text: str, *, of_point: bool = False) -> list[Number]:
    """Return the numbers of a text that holds numbers, signs between numbers, and nothing else; otherwise none."""
    folded = fold(text).strip()
    numbers = read_numbers(folded, of_point=of_point or is_point(folded))
    rest, place = "", 0
    for number in numbers:
        rest += folded[place : number.start]
        place = number.end
    return numbers if _BETWEEN.fullmatch(rest + folded[place:]) else []


def is_point(answer: str) -> bool:
    """Return whether the right answer is a list of numbers in brackets, such as (12,345) or {12,345}."""
    found = _BRACKETED.fullmatch(re.sub(r"\\left|[$\s]", "", fold(answer)))
    return found is not None and ("," in found[0] or ";" in found[0])


def same(first: Number, second: Number) -> bool:
    """Return whether two numbers are equal; a percentage equals the number before the sign, and its hundredth."""
    return first.value == second.value or any(_equal(left, right) for left, right in _readings(first, second))


def is_near(first: Number, second: Number) -> bool:
    """Return whether two numbers are equal up to a millionth of the larger number."""
    with suppress(OverflowError):  # a fraction beyond all floats
        if any(math.isclose(float(left), float(right), rel_tol=1e-6) for left, right in _readings(first, second)):
            return True
    return same(first, second)


def ends_with(numbers: Sequence[Number], right: Sequence[Number]) -> bool:
    """Return whether the last numbers are the right numbers, in order."""
    last = numbers[-len(right) :] if right else []
    return bool(right) and len(last) == len(right) and all(map(same, last, right))


def number(completion: str, answer: str) -> float:
    """Return whether the last number in the completion equals the last in the answer.

    If the answer is a list of numbers and nothing else, as many last numbers of the completion are compared. If
    both have brackets around two numbers, the brackets are compared, too. Two numbers without brackets are a point."""
    right = numbers_alone(answer) or read_numbers(answer)[-1:]
    wanted, brackets = (_brackets(text) if len(right) == 2 else "" for text in (answer, completion))
    if wanted not in ("", brackets) and (brackets or wanted in ("(]", "[)")):
        return 0.0
    of_point = is_point(answer)
    alone = numbers_alone(completion, of_point=of_point) if len(right) > 1 else []
    given = alone or read_numbers(completion, of_point=of_point)
    return float(ends_with(given, right) and len(alone) in (0, len(right)))


def _brackets(text: str) -> str:
    """Return the brackets around the last two numbers in brackets, such as `[)`; nothing if there are none."""
    found = _ENCLOSED.finditer(re.sub(r"\\(?:left|right)", "", fold(text)))
    return "".join(next((one.groups() for one in [*found][::-1] if len(numbers_alone(one[0])) == 2), ()))


def plain(text: str) -> str:
    """Return `text` with the numbers as digits, a point and a slash: 1,234.5 as 1234.5, and 1 1/2 as 3/2.

    Tags and letters of scripts without blanks are apart from numbers, since math-verify finds none beside them."""
    text = fold(text)
    written, place = "", 0
    for number in read_numbers(text):
        as_written = text[number.start : number.end]
        if isinstance(number.value, tuple):
            continue
        is_plain = _PLAIN.fullmatch(as_written) is not None
        written += text[place : number.start]
        written += " " * written[-1:].isdigit()  # before a fraction such as ½
        written += as_written if is_plain else digits_of(number)
        place = number.end
    written += text[place:]
    return _BEFORE.sub(" ", _BEHIND.sub(" ", written))


def digits_of(number: Number) -> str:
    """Return a number as digits, or with a power of ten in LaTeX if there would be many digits."""
    if not isinstance(number.value, Decimal):
        assert isinstance(number.value, Fraction)
        return str(number.value)
    if abs(exponent := number.value.adjusted()) < 40:
        return f"{number.value:f}"
    return f"{number.value.scaleb(-exponent):f} \\times 10^{{{exponent}}}"


def _read(found: re.Match[str], *, in_brackets: bool, of_point: bool) -> list[Number]:
    is_percent = found["percent"] is not None
    start, end = found.start(), found.start("percent") if is_percent else found.end()
    is_negative = found["sign"] == "-"
    if found["clock"]:
        return [Number(tuple(int(part) for part in found["clock"].split(":")), is_percent, start, end)]
    top, bottom = (found["top"] or found["upper"] or found["over"], found["bottom"] or found["lower"] or found["under"])
    if found["vulgar"]:
        top, bottom = unicodedata.normalize("NFKC", found["vulgar"]).split("\u2044")
    if top is not None:
        whole = (found["mixed"] or "").replace(",", "") or found["whole"] or "0"
        if len(top + bottom + whole) > _MOST_DIGITS:
            raise ValueError("more digits than Python writes")
        value = int(whole) + Fraction(int(top), int(bottom))
        return [Number(-value if is_negative else value, is_percent, start, end)]
    if raised := found["power"] or found["raised"]:
        decimals = [(f"1e{raised.translate(_SUPERSCRIPTS)}", start, end)]
    elif found["grouped"]:
        groups = found["grouped"].split(found["gap"])
        decimals = [("".join(groups).replace(",", "."), start, end)]
    elif found["part"]:
        decimals = [(found["part"], start, end)]
    else:
        decimals = [
            (digits, found.start("run") + at, found.start("run") + to)
            for digits, at, to in _split(found["run"], in_brackets, of_point)
        ]
    exponent = found["e"] or found["ten"] or found["tens"]
    numbers = []
    for place, (digits, at, to) in enumerate(decimals):
        is_last = place == len(decimals) - 1
        digits = f"-{digits}" if is_negative and place == 0 else digits
        digits += f"e{exponent.translate(_SUPERSCRIPTS)}" if exponent and is_last else ""
        at, to = start if place == 0 else at, end if is_last else to
        if abs((value := Decimal(digits)).adjusted()) > _MOST_EXPONENT:
            raise ValueError("beyond what Decimal computes with")
        numbers.append(Number(value, is_percent and is_last, at, to))
    return numbers


def _split(run: str, in_brackets: bool, of_point: bool) -> list[tuple[str, int, int]]:
    """Return the numbers of digits with points and commas between them, each with its place in `run`."""
    if "," not in run and run.count(".") < 2:
        return [(run, 0, len(run))]
    if _THOUSANDS.fullmatch(run) and not (in_brackets and of_point):
        return [(run.replace(",", ""), 0, len(run))]
    if _DOTTED_THOUSANDS.fullmatch(run):
        return [(run.replace(".", "").replace(",", "."), 0, len(run))]
    if run.count(",") == 1 and "." not in run and not in_brackets:
        return [(run.replace(",", "."), 0, len(run))]
    pieces = re.finditer(r"[^,]+" if "," in run else r"[^.]+", run)
    return [(piece[0], *piece.span()) for piece in pieces if piece[0].count(".") < 2]


def _readings(first: Number, second: Number) -> list[tuple[Decimal | Fraction, Decimal | Fraction]]:
    """Return the pairs of values to compare; none for times."""
    left, right = first.value, second.value
    if isinstance(left, tuple) or isinstance(right, tuple):
        return []
    if first.is_percent == second.is_percent:
        return [(left, right)]
    return [(left, right), (_hundredth(left), right) if first.is_percent else (left, _hundredth(right))]


def _hundredth(value: Decimal | Fraction) -> Decimal | Fraction:
    return value.scaleb(-2) if isinstance(value, Decimal) else value / 100


def _equal(first: Decimal | Fraction, second: Decimal | Fraction) -> bool:
    if isinstance(first, Decimal) and isinstance(second, Decimal):
        return first == second
    if any(isinstance(one, Decimal) and abs(one.adjusted()) > _MOST_DIGITS for one in (first, second)):
        return False
    return Fraction(first) == Fraction(second)
