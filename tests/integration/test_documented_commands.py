"""Commands of the docs as a reader gives them, one after the other, with what the page shows that they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages.documentation import commands
from tests.pages.runs import RL_STEPS, Checkout, can_be_started

_LOOKED_INTO = ("journal.md", "environments.md", "evaluation.md", "first_run.md")
STARTED = {"README.md", "checkpoints.md", *_LOOKED_INTO}
"""Pages whose commands are all started here; of the others they are checked by --dry-run, as those of kill_it.md, which
are the README's."""
pytestmark = [pytest.mark.docs, pytest.mark.launch, pytest.mark.timeout(2400)]  # many whole runs in one test
# A user's own run and a store on a network: checked, not started.
_NOT_STARTED = "my_run.toml"


def test_the_page_about_checkpoints(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    for command in commands(ROOT / "docs" / "checkpoints.md"):
        if not can_be_started(command):
            continue
        checkout.start(command, *(["--dry-run"] if _NOT_STARTED in command.words else []))
    assert (tmp_path / "outputs" / "exported" / "config.json").exists()


def test_the_readme(tmp_path: Path) -> None:
    """All of it, the quick start too; the second run of `Kill it` ends with the bits of the first."""
    checkout = Checkout(tmp_path)
    checkout.save_files(ROOT / "README.md")
    for command in commands(ROOT / "README.md"):
        if not can_be_started(command):
            continue
        short = ["--max-steps", "3"] if "outputs/addition" in command.words else []
        checkout.start(command, *short)
    weights = [tmp_path / "outputs" / name / f"weights/step_{RL_STEPS}" for name in ("reverse_text_rl", "killed")]
    first, second = ((path / "model.safetensors").read_bytes() for path in weights)
    assert first == second


@pytest.mark.parametrize("page", _LOOKED_INTO)
def test_pages_whose_runs_are_looked_into(page: str, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.save_files(ROOT / "docs" / page)
    for command in commands(ROOT / "docs" / page):
        if can_be_started(command):
            assert checkout.start(command).strip()
