"""A copy of the repository to which a section of docs/developing.md is done: ```python add=PATH is a file to add, and
the lines with `+` of ```diff of=PATH are added to one that is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.pages.documentation import Block, blocks, section

PAGE = ROOT / "docs" / "developing.md"


class Copy:
    """The packages of the repository under `path`, with what the sections `titles` add."""

    def __init__(self, path: Path, *titles: str) -> None:
        self.path = path
        for name in ("src", "tests", "docs"):
            shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("configs", "examples"):
            (path / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / "pyproject.toml", path)
        self.additions = [b for title in titles for b in blocks(PAGE) if b.line in section(PAGE, title)]
        for block in self.additions:
            self._apply(block)

    def _apply(self, block: Block) -> None:
        added, changed = block.option("add"), block.option("of")
        if added is not None:
            target = self.path / added
            assert not target.exists(), f"{block.where}: {added} is there already"
            target.write_text(block.text)
        elif changed is not None:
            target = self.path / changed
            lines = block.text.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] == " ")
            assert target.read_text().count(before) == 1, f"{block.where}: these lines are not in {changed}"
            target.write_text(target.read_text().replace(before, "".join(line[1:] for line in lines)))

    def python(self, *arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(self.path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def added_lines(self) -> list[str]:
        """Return the lines that the sections add to files that are there."""
        text = "".join(block.text for block in self.additions if block.option("of") is not None)
        return re.findall(r"^\+(.*)$", text, re.MULTILINE)
