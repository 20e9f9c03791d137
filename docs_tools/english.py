"""The English of README, docs, docstrings and comments: length of sentences, share of function words, patterns of bad
style. `python -m docs_tools.english [PAGE --worst 30]` prints pages and the worst sentences, and exits with 1 if a
limit does not hold; `python -m docs_tools.english src/holdfast/cli.py` does so for docstrings and comments, by their
lines. Fenced blocks, footnotes and generated parts do not count."""

import argparse
import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_WORDS = 46_000
"""README and docs together, with tables and fenced blocks, as `wc -w` counts."""
MAX_PAGES = 30
"""Pages in docs/, and README."""
MAX_AVERAGE = 20
"""Words a sentence, on the average of a page."""
MAX_SENTENCE = 35
MAX_VAGUE = 0.03
"""Share of vague sentences on a page, or one of them; `MAX_VAGUE_OVERALL` on all pages together."""
MAX_VAGUE_OVERALL = 0.01
VAGUE = 0.70
"""A sentence with a greater share of function words is vague."""

_FUNCTION_WORDS = """
    a an the of and or to in on at by for with without from as is are was were be been it its itself that this these
    those what which who whom whose where when while until than then there here not no nor one ones other others another
    each every any some all none so too also still again already yet once only alone more most less least same such own
    them they their he she him her his we our us you your has have had do does did done may might can cannot could must
    shall should will would if unless because but before after behind beside besides ahead between beyond else otherwise
    how why whether say says said goes go gone come comes came make makes made take takes taken took give gives given
    let lets get gets put stands stand lies lie two about into out up down over under through upon
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
PATTERNS = {
    r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! (?:longer|more|less|fewer|later|earlier))": "is not a",
    r"\b[Oo]ne (?:that|which|who|of those|of these|of them)\b": "repeat the noun",
    r"\b(?:[Tt]hose|[Tt]hat) (?:of|which)\b": "repeat the noun",
    r"\b[Tt]hose (?:that|who|in|on|for|with)\b": "repeat the noun",
    r"\b[Ss]uch a one\b|\b[Ww]hoever\b": "name the subject",
    r"^(?:What|Who|Of|Where|So|Nor|Behind)\b[^?]*$": "the subject first",
    r"\b(?:of|from|than|with|by) what\b": "name the noun", r"\b[Bb]ut for\b": "except", r"\b[Bb]ehind\b": "after",
    r"\b(?:go|goes|went|going) on\b": "continue, resume", r"\b(?:afresh|anew)\b": "from scratch, again",
    r"(?<!left )\balone\b": "only", r"\bbesides\b": "also, except",
    r"\bso (?:does|do|did|is|are|was|has)\b(?! not)(?= (?:the|a|an|its|it|they|this|that|all|each)\b)": "too",
    r"\b(?:lies?|stands?)\b(?! (?:for|still)\b)": "is", r"\bis (?:then )?said\b|\botherwise than\b": "say who acts",
    r"\b(?:canary text|signs? of life)\b": "the field's word",
}  # fmt: skip
"""What STYLE forbids and a machine finds without doubt -> what to write."""

_FENCE = re.compile(r"^( *)```[^\n]*\n.*?^\1```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", re.DOTALL)
_FOOTNOTE = re.compile(r"^\[\^[\w-]+\]:.*\n(?: {4}.*\n)*", re.MULTILINE)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]+\)")
_END = re.compile(r"""(?<=[.!?:])["*)]*\s+(?=["*(]*[A-Z0-9])""")
_LEAST = 8
"""Words without which a sentence is too short to be vague."""


@dataclass(frozen=True)
class Sentence:
    text: str  # with a word in place of each span of code
    shown: str  # as it is on the page
    is_cell: bool

    @cached_property
    def num_words(self) -> int:
        """Words; none of a list of names, and no code of a cell."""
        if self.text.count(",") * 2 > len(self.text.split()):  # a list of names
            return 0
        text = re.sub(r"\bCode\d+", "", self.text) if self.is_cell else self.text
        return sum(any(letter.isalnum() for letter in word) for word in text.split())

    @cached_property
    def vagueness(self) -> float:
        """The share of function words; 0 for a short sentence."""
        words = re.findall(r"[A-Za-z']+", self.text)
        share = sum(word.lower() in FUNCTION_WORDS for word in words) / max(1, len(words))
        return share if self.num_words >= _LEAST else 0.0

    @cached_property
    def faults(self) -> list[str]:
        """Each forbidden pattern that the sentence has, with what to write."""
        found = [(re.search(pattern, self.text), instead) for pattern, instead in PATTERNS.items()]
        return [f"'{' '.join(match[0].split()[:3])}': {instead}" for match, instead in found if match]


@dataclass(frozen=True)
class Page:
    path: Path

    @cached_property
    def num_words(self) -> int:
        return len(self.path.read_text().split())

    @cached_property
    def sentences(self) -> list[Sentence]:
        return list(_sentences(self.path.read_text()))

    @property
    def average(self) -> float:
        """Words a sentence, without the cells of tables."""
        lengths = [sentence.num_words for sentence in self.sentences if not sentence.is_cell]
        return sum(lengths) / max(1, len(lengths))

    @cached_property
    def num_whole(self) -> int:
        """Sentences that are long enough to be vague."""
        return sum(sentence.num_words >= _LEAST for sentence in self.sentences)

    @property
    def vague(self) -> list[Sentence]:
        return [sentence for sentence in self.sentences if sentence.vagueness > VAGUE]

    @property
    def too_long(self) -> list[Sentence]:
        return [sentence for sentence in self.sentences if sentence.num_words > MAX_SENTENCE]

    @property
    def faulty(self) -> list[Sentence]:
        return [sentence for sentence in self.sentences if sentence.faults]

    @property
    def breaks(self) -> list[str]:
        """The limits of one page that this page does not keep."""
        found = []
        if self.average > MAX_AVERAGE:
            found.append(f"{self.average:.1f} words a sentence, at most {MAX_AVERAGE}")
        if len(self.vague) > max(1, MAX_VAGUE * self.num_whole):
            found.append(f"{len(self.vague)} of {self.num_whole} sentences are vague, at most {MAX_VAGUE:.0%}")
        found += [f"{sentence.num_words} words: {sentence.shown}" for sentence in self.too_long]
        found += [f"{'; '.join(sentence.faults)}: {sentence.shown}" for sentence in self.faulty]
        return found


def pages(root: Path) -> list[Page]:
    return [Page(root / "README.md"), *map(Page, sorted((root / "docs").glob("*.md")))]


def overall(measured: Iterable[Page]) -> list[str]:
    """Return the limits of all pages together that do not hold."""
    measured = list(measured)
    num_words = sum(page.num_words for page in measured)
    num_sentences, num_vague = sum(page.num_whole for page in measured), sum(len(page.vague) for page in measured)
    num_pages = len(measured)
    found = []
    if num_words > MAX_WORDS:
        found.append(f"{num_words} words, at most {MAX_WORDS}")
    if num_pages > MAX_PAGES:
        found.append(f"{num_pages} pages, at most {MAX_PAGES}")
    if num_vague >= MAX_VAGUE_OVERALL * num_sentences:
        found.append(f"{num_vague} of {num_sentences} sentences are vague, less than {MAX_VAGUE_OVERALL:.0%} allowed")
    return found


def _sentences(text: str) -> Iterator[Sentence]:
    for pattern in (_FENCE, _GENERATED, _FOOTNOTE, re.compile(r"<!--.*?-->", re.DOTALL)):
        text = pattern.sub("", text)
    spans = re.findall(r"`[^`]+`", text)
    numbers = itertools.count()
    text = re.sub(r"`[^`]+`", lambda _: f"Code{next(numbers)}", text)
    text = re.sub(r"\[\^[\w-]+\]", "", _LINK.sub(r"\1", text))
    text = re.sub(r"^(\|[^\n]*)$", r"\n\1\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text):
        lines = " ".join(paragraph.split())
        if not lines or lines.startswith("#"):
            continue
        is_table = lines.startswith("|")
        for part in re.split(r"(?<!\\)\|", lines) if is_table else [re.sub(r"^(?:[-*]|\d+\.) ", "", lines)]:
            for sentence in _END.split(re.sub(r"[*_]{2}|(?<!\w)\*|\*(?!\w)", "", part).strip()):
                if re.search(r"[A-Za-z]{2}", sentence):
                    shown = re.sub(r"\bCode(\d+)", lambda match: spans[int(match[1])], sentence)
                    yield Sentence(sentence, " ".join(shown.split()), is_table)


MAX_SENTENCE_OF_CODE = 40
"""Words of a sentence in a docstring or comment."""
_FIELD = re.compile(r"^ *[\w*]+(?:, [\w*]+)*: ", re.MULTILINE)
_FOR_TOOLS = re.compile(r"(?:type: ignore|noqa|fmt:)[^#]*(?:# )?")
_ROW = re.compile(r"^ *(\S.*?\S) {2,}(?=\S)", re.MULTILINE)


def faults_of_code(path: Path) -> list[str]:
    """Return what is forbidden in docstrings and comments of a module, each with its line."""
    found = []
    for line, text in sorted([*_docstrings(path), *_comments(path)]):
        text = _FIELD.sub("\n\n", _ROW.sub(r"\n\n\1\n\n", text))
        for sentence in _sentences(text):
            faults = list(sentence.faults)
            if sentence.num_words > MAX_SENTENCE_OF_CODE:
                faults.append(f"{sentence.num_words} words")
            if faults:
                found.append(f"{path}:{line}: {'; '.join(faults)}: {sentence.shown}")
    return found


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield comments; lines below one another are one comment."""
    begun, last, words = 0, (0, 0), ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start != (last[0] + 1, last[1]):
            yield begun, words
            begun, words = token.start[0], ""
        words += " " + _FOR_TOOLS.sub("", token.string.lstrip("# "))
        last = token.start
    yield begun, words


def main(argv: list[str] | None = None) -> int:
    """Print the measurements of the pages; return 1 if a limit does not hold."""
    parser = argparse.ArgumentParser(prog="python -m docs_tools.english")
    parser.add_argument(
        "pages", nargs="*", type=Path, help="default: README.md and docs/*.md, below this directory; or modules"
    )
    parser.add_argument("--worst", type=int, default=10, help="vague sentences to print of each page")
    arguments = parser.parse_args(argv)
    if arguments.pages and all(path.suffix == ".py" for path in arguments.pages):
        print(*(found := [line for path in arguments.pages for line in faults_of_code(path)]), sep="\n")
        return bool(found)
    measured = [Page(path) for path in arguments.pages] or pages(Path.cwd())
    print(f"{'page':<34} words sentences  mean  >{MAX_SENTENCE}  vague  patterns")
    for page in measured:
        share = len(page.vague) / max(1, page.num_whole)
        print(f"{page.path.name:<34} {page.num_words:5} {page.num_whole:9} {page.average:5.1f} "
              f"{len(page.too_long):4} {share:6.1%} {len(page.faulty):9}")  # fmt: skip
    for page in measured:
        lines = page.breaks
        vague = sorted(page.vague, key=lambda sentence: -sentence.vagueness)[: arguments.worst]
        lines += [f"{sentence.vagueness:.0%} function words: {sentence.shown}" for sentence in vague]
        if lines:
            print(f"\n{page.path}", *lines, sep="\n  ")
    total = [] if arguments.pages else overall(measured)
    print(f"\n{sum(page.num_words for page in measured)} words, {len(measured)} pages", *total, sep="\n")
    return 1 if total or any(page.breaks for page in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
