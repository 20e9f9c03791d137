"""README and docs as the tests read them: fenced blocks in the order of the page, links, headings.

Every fence names its language:

    ```console            commands for a shell in the root of a checkout, one per line. Where lines begin with `$ `,
                          those are the commands and the others what they print: digits count as any number, `...`
                          as any text
    ```python             must compile; `file=name.py` behind it: the file that later blocks of the page import;
                          `add=PATH`: a file to add to the repository, see tests/pages/additions.py
    ```diff of=PATH       lines to add to a file of the repository
    ```toml COMMAND       settings of COMMAND
    ```yaml               must be read by a parser
    ```bash  ```text      a script, which must be one for bash; anything else"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.conftest import ROOT

PAPERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES = [*PAPERS, *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"console", "python", "toml", "yaml", "bash", "diff", "text"}
_GET_UV = ["pip", "install", "uv", "&&"]
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    where: str
    line: str
    words: list[str]  # the line as a shell splits it, without what installs: `pip install uv &&` and `uv run`
    output: list[str] = field(default_factory=list)  # the lines that the page shows below it

    @property
    def program(self) -> str:
        """What is run: `sft`, or `python -m benchmarks.startup`."""
        return " ".join(self.words[:3]) if self.words[:2] == ["python", "-m"] else self.words[0]

    def flag(self, name: str) -> str | None:
        """Return the word behind `--name`; None without that flag, an empty string where it stands alone."""
        if f"--{name}" not in self.words:
            return None
        place = self.words.index(f"--{name}") + 1
        return self.words[place] if place < len(self.words) and not self.words[place].startswith("--") else ""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    info: list[str]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def file(self) -> str | None:
        return self.option("file")

    def option(self, name: str) -> str | None:
        """Return what stands behind `NAME=` on the fence; None without it."""
        return next((word.removeprefix(f"{name}=") for word in self.info if word.startswith(f"{name}=")), None)

    @cached_property
    def commands(self) -> list[Command]:
        lines = self.text.splitlines()
        has_output = any(line.startswith("$ ") for line in lines)
        found: list[Command] = []
        for number, line in enumerate(lines, start=self.line + 1):
            if has_output and not line.startswith("$ "):
                found[-1].output.append(line)
            elif line.strip():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                where = f"{self.page.relative_to(ROOT)}:{number}"
                found.append(Command(where, line, behind_uv(words)))
        return found


def behind_uv(words: list[str]) -> list[str]:
    """Return what `uv run` runs, here where the groups and packages that it would install are: the words behind it."""
    if words[: len(_GET_UV)] == _GET_UV:
        words = words[len(_GET_UV) :]
    if words[:2] != ["uv", "run"]:
        return words
    return words[4:] if words[2] in ("--group", "--with") else words[2:]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[2].split(), match[3])
        for match in _FENCE.finditer(text)
    ]


def section(page: Path, title: str) -> range:
    """Return the numbers of the lines of a section: from its heading to the next of its level or above."""
    lines = page.read_text().splitlines()
    starts = [number for number, line in enumerate(lines, start=1) if re.fullmatch(rf"#+ {re.escape(title)}", line)]
    assert len(starts) == 1, f"{page.name} has {len(starts)} sections '{title}'"
    level = lines[starts[0] - 1].index(" ")
    ends = (n for n in range(starts[0] + 1, len(lines) + 1) if re.match(rf"#{{1,{level}}} ", lines[n - 1]))
    return range(starts[0], next(ends, len(lines) + 1))


def commands(page: Path) -> list[Command]:
    return [command for block in blocks(page) if block.language == "console" for command in block.commands]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Give the targets of the links and pictures of a page that lead to files of the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            yield target


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings of a page can be linked to, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def shows(expected: list[str], printed: str) -> str | None:
    """Return the first line of `expected` that `printed` does not have behind those before; None if it has all. Digits
    stand for any number, `...` for any text, and white space for any other."""
    rest = [_blurred(line) for line in printed.splitlines()]
    for line in expected:
        if not line.strip():
            continue
        pattern = re.compile(r".*".join([re.escape(_blurred(part)) for part in line.split("...")]))
        place = next((number for number, other in enumerate(rest) if pattern.fullmatch(other)), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return None


def _blurred(line: str) -> str:
    number = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
    return re.sub(r"\s+", " ", re.sub(number, "#", line)).strip()
