"""The site is built without a warning, has what the code has, and asks nobody for anything."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from docs_tools import api, links, options
from docs_tools.listing import free_settings
from holdfast.cli import COMMANDS
from holdfast.config.flags import flags_of
from tests.conftest import ROOT
from tests.pages.documentation import Command
from tests.pages.runs import Checkout

_FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)[^>]*(?:src|href)="?(https?://[^\s">]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as strictly as its settings say."""
    directory = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


@pytest.mark.docs
def test_every_page_and_every_command_is_there(site: Path) -> None:
    """That each of them is in the navigation is what the strict build sees to."""
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    commands = [Path("commands") / f"{name}.html" for name in COMMANDS]
    assert not [page for page in [*pages, *commands, Path("index.html")] if not (site / page).is_file()]
    assert "HarnessEnvironment.play" in (site / "python_api/index.html").read_text()


@pytest.mark.docs
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    assert not {url for page in site.rglob("*.html") for url in _FETCHED.findall(page.read_text())}


@pytest.mark.docs
def test_blocks_and_links_out_of_the_pages_arrive(site: Path) -> None:
    assert "class LastLetters" in re.sub("<[^>]+>", "", (site / "index.html").read_text())
    assert "```" not in (site / "environments.html").read_text()
    assert (site / "files/examples/sft_loop.py").read_bytes() == (ROOT / "examples/sft_loop.py").read_bytes()
    assert 'href="files/examples/sft_loop.py"' in (site / "checkpoints.html").read_text()


@pytest.mark.parametrize("command", options.SETTINGS)
def test_a_page_has_every_setting_of_its_command(command: str) -> None:
    keys = {flag.key for flag in flags_of(options.SETTINGS[command]).values()}
    tables = options.tables(command)
    shown = {row.key for table in tables for row in table.settings} | {table.key.removesuffix("[]") for table in tables}
    elsewhere = tuple(f"{table.key}." for table in tables if table.elsewhere) or ("-",)
    missing = [key for key in keys if key not in shown and not key.startswith(elsewhere)]
    page = options.page(command)
    assert not [key for key in missing if f"`{key}.NAME`" not in page] and len(keys) > 20
    assert not [
        row.key for table in tables for row in table.settings if options.cell_of(row.key) not in page or not row.text
    ]


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name in options.FORMS or name not in options.SETTINGS]
)
def test_a_page_has_every_flag_of_its_command(command: str) -> None:
    forms = [] if command in options.SETTINGS else [[]]
    parsers = [
        options.parser_of(command, *form) for form in [*forms, *([word] for word in options.FORMS.get(command, []))]
    ]
    for parser in parsers:  # which grows by their subcommands
        subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers += [child for action in subparsers for child in action.choices.values()]
    flags = {word for parser in parsers for action in parser._actions for word in action.option_strings}
    page = options.page(command)
    assert not [flag for flag in flags - {"-h", "--help"} if f"`{flag}" not in page and f", {flag}" not in page]
    assert len(flags) > 2  # more than those of the help


def test_the_page_of_the_python_api_has_every_public_name_with_its_text() -> None:
    page = api.page()
    assert sorted(name for names in api.GROUPS.values() for name in names) == sorted(holdfast.__all__)
    assert not [name for name in holdfast.__all__ if f"### {name}\n" not in page]
    assert not re.findall(r"```\n\n#+ .*", page), "a name without a docstring"
    assert "#### Session.append_messages\n" in page and "- `reward`: a finite number" in page
    hidden = [(getattr(holdfast, name), member) for name, members in api.INTERNAL.items() for member in members]
    assert not [member for owner, member in hidden if not hasattr(owner, member)]


@pytest.mark.docs
def test_the_examples_of_the_commands_can_be_given_one_after_the_other(
    in_tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    checkout = Checkout(in_tmp_path)
    assert options.EXAMPLES.keys() <= COMMANDS.keys()
    for name, (guide, line) in options.EXAMPLES.items():
        assert line.split()[0] == name and f"]({guide})" in options.page(name).replace("../", "")
        checkout.dry_run(Command(f"the page of {name}", line, line.split()), run_command)


def test_settings_are_shown_with_type_default_and_what_a_resume_may_change() -> None:
    (plain, *_) = options.tables("sft")
    rows = {row.key: row for table in options.tables("trainer") for row in table.settings}
    assert rows["max_steps"].kind == "int, ≥ 1" and rows["max_steps"].default == "100" and rows["max_steps"].is_free
    assert rows["ckpt.resume_step"].kind == 'int or "latest" or "auto"' and rows["ckpt.resume_step"].default == "unset"
    assert rows["optim.betas"].kind == "[float, float]" and not rows["optim.betas"].is_free
    assert rows["keep_attempts"].kind == 'int, ≥ 1 or "all"' and "output_dir" in {row.key for row in plain.settings}
    evaluated = {row.key: row for table in options.tables("evaluate") for row in table.settings}
    assert evaluated["environments"].default == "[]" and evaluated["seed"].is_free is None
    free = {
        row.key
        for command in options._RESUMES
        for table in options.tables(command)
        for row in table.settings
        if row.is_free
    }
    sections = {table.key for command in options._RESUMES for table in options.tables(command)}
    assert not [key for key in free_settings() if key not in free | sections]


def test_options_that_newcomers_from_elsewhere_are_told_are_there() -> None:
    """The column `here` of docs/coming_from.md; a key may have the name of its process before it."""
    shown = [table for command in options.SETTINGS for table in options.tables(command)]
    known = {row.key for table in shown for row in table.settings} | {table.key for table in shown}
    told: list[str] = []
    column = None
    for line in (ROOT / "docs" / "coming_from.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", " ").split("|")]
        column = (cells.index("here") if "here" in cells else column) if line.startswith("|") else None
        if column is not None:
            told += re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", cells[column])
    assert len(told) > 40
    assert not [key for key in told if not {key, re.sub(r"^(trainer|orchestrator|inference)\.", "", key)} & known]


def test_links_lead_to_pages_to_copied_files_or_to_the_repository() -> None:
    text = "[a](../README.md#limits) [b](../examples/sft_loop.py) [c](files.md#format) [d](#x) [e](https://a.b/c.md)"
    assert links.rewritten(text, "data.md", None) == (
        "[a](index.md#limits) [b](files/examples/sft_loop.py) [c](files.md#format) [d](#x) [e](https://a.b/c.md)"
    )
    online = links.rewritten(
        "![p](../benchmarks/learning/curves.png) [s](../src/holdfast) [l](../LICENSE)", "data.md", "https://h/r/"
    )
    assert online == (
        "![p](files/benchmarks/learning/curves.png) [s](https://h/r/tree/main/src/holdfast) [l](https://h/r/blob/main/LICENSE)"
    )
    assert links.rewritten("```text\n[a](nowhere.md)\n```", "index.md", None) == "```text\n[a](nowhere.md)\n```"


@pytest.mark.parametrize(("link", "reason"), [("../nowhere.py", "there is no nowhere.py"), ("../src", "repo_url")])
def test_links_that_cannot_be_on_the_site_are_refused(link: str, reason: str) -> None:
    with pytest.raises(links.DeadLink, match=reason):
        links.rewritten(f"[a]({link})", "data.md", None)
