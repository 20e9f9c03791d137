"""The project's papers: what forges, citers, containers and language models read."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import COMMANDS
from tests.conftest import ROOT
from tests.pages.documentation import PAGES, links

DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
_OF_OTHERS = re.compile(r"^(VLLM|CUDA|NVIDIA|TORCH|PYTORCH|TOKENIZERS|RAY_ENABLE|PYTHON(HASHSEED|SAFEPATH))")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_links_of_the_file_for_language_models_lead_somewhere() -> None:
    """Those of the papers in Markdown are looked at with the pages."""
    found = list(links(ROOT / "llms.txt"))
    assert len(found) > 20
    assert not [link for link in found if not (ROOT / link).is_file()]


def test_the_file_for_language_models_has_its_form_and_every_page() -> None:
    """llmstxt.org: a title, a quote, text, and sections of links with a note behind each."""
    lines = (ROOT / "llms.txt").read_text().splitlines()
    assert lines[0] == f"# {project()['name']}" and lines[2].startswith("> ")
    below = lines[next(number for number, line in enumerate(lines) if line.startswith("## ")) :]
    assert not [line for line in below if line and not re.fullmatch(r"## .+|- \[[^\]]+\]\([^)]+\): .+", line)]
    named = {(ROOT / link).resolve() for link in links(ROOT / "llms.txt")}
    assert not [page.name for page in PAGES if page not in named]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_are_clean_and_copy_what_is_there(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    linted = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    text = dockerfile.read_text()
    allowed = set((ROOT / ".dockerignore").read_text().replace("!", "").split())
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and source in allowed, source
    users = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert users and users[-1] != "0"
    assert "--frozen --no-dev" in text and f"docker/{dockerfile.name}" in (ROOT / "docs/your_model.md").read_text()


def test_groups_that_the_dockerfiles_name_are_there() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    named = {name for path in DOCKERFILES for name in re.findall(r"--(?:no-)?group (\w+)", path.read_text())}
    assert named == {"cpu", "gpu"} and named <= groups.keys()


def test_environment_variables_that_are_read_are_documented() -> None:
    """Every name in capitals that the code asks the environment for, or sets for its own processes."""
    page = (ROOT / "docs" / "files.md").read_text()
    asked = re.compile(
        r"""(?:environ(?:\.get|\.pop|\.setdefault)?[\[(]|environment\.get\(|_ENV(?:: str)? = )"([A-Z][A-Z_]+)\""""
    )
    code = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    names = {name for name in asked.findall(code) if not _OF_OTHERS.match(name)}
    assert len(names) > 8
    missing = [name for name in sorted(names) if name not in page and not name.startswith("SLURM_")]
    # Set by torchrun for ranks that it starts, and read by them alone.
    assert set(missing) <= {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def test_the_readme_is_short_and_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    assert not [name for name in COMMANDS if f"`{name}`" not in text]


def test_every_page_is_linked_from_the_readme_or_another_page() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert not [page.name for page in PAGES if page.name != "README.md" and page not in linked]
