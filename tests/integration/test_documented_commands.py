"""Commands of the docs as a reader gives them, one after the other, with what the page shows that they print."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages.documentation import commands
from tests.pages.runs import MAKE_MODEL, RL_STEPS, Checkout, can_be_started, is_run

_LOOKED_INTO = ("files.md", "environments.md", "evaluation.md", "first_run.md", "smollm2.md")
STARTED = {"README.md", "checkpoints.md", *_LOOKED_INTO}
"""Pages whose commands are all started here; of the others they are checked by --dry-run."""
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
    """All of it, the quick start too; each of its runs, and the first of first_run.md, is killed and given again. They
    end with the bits of those that nobody killed; so does the second run of the README, as its checksums say. A small
    model stands in for SmolLM2."""
    whole, killed = (Checkout(tmp_path / name) for name in ("whole", "killed"))
    printed = {}
    for checkout in (whole, killed):
        checkout.save_files(ROOT / "README.md")
    for command in commands(ROOT / "README.md"):
        if command.program == "sha256sum":
            words = [word.replace("step_50", f"step_{RL_STEPS}") for word in command.words]
            sums = subprocess.check_output(words, cwd=whole.path, text=True).splitlines()
            assert len(sums) == 2 and len({line.split()[0] for line in sums}) == 1
        if not can_be_started(command):
            continue
        short = ["--max-steps", "3"] if "outputs/last_letters" in command.words else []
        printed[tuple(command.words[:3])] = whole.start(command, *short)
        if is_run(command):
            killed.start_and_kill(command, *short, printed=printed[tuple(command.words[:3])])
        elif command.program == MAKE_MODEL:
            killed.start(command)
    first = next(filter(is_run, commands(ROOT / "docs" / "first_run.md")))
    killed.start_and_kill(first, printed=printed[tuple(first.words[:3])])
    made, remade = ({path.parent.parent.parent.name: path for path in sorted(
        checkout.path.glob("outputs/*/weights/step_*/model.safetensors"), key=lambda path: int(path.parent.name[5:])
    )} for checkout in (whole, killed))  # fmt: skip
    same = {"killed": "reverse_text_rl", "first": "reverse_text_rl"}
    assert len(remade) >= 6 and remade.keys() - {"first"} == made.keys()
    for name, path in [*remade.items(), ("killed", made["killed"])]:
        other = made[same.get(name, name)]
        assert path.parent.name == other.parent.name and path.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("page", _LOOKED_INTO)
def test_pages_whose_runs_are_looked_into(page: str, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.save_files(ROOT / "docs" / page)
    for command in commands(ROOT / "docs" / page):
        if can_be_started(command):
            assert checkout.start(command).strip()
