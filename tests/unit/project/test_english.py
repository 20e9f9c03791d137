"""README and docs are in plain English, and short: the limits of tests/pages/english.py hold."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pages.english import Page, overall, pages

PAGES = pages(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_page_is_in_plain_english(page: Page) -> None:
    assert not page.breaks, "\n".join([f"{page.path.name}:", *page.breaks])


def test_all_pages_together_are_short() -> None:
    assert not overall(PAGES)


def test_bad_english_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Of headings nothing is asked\n\n"
        "What it has is that of the one that was there before it, or not. A file is no page, but for `is no` code.\n\n"
        "```text\nWhat is in here is no matter.\n```\n\n"
        "| Who | Saves run in the background |\n|---|---|\n\n"
        "[^note]: What tests are called is no matter.\n"
    )
    first, second, *cells = Page(page).sentences
    assert first.vagueness > 0.9 and len(first.faults) == 3 and first.num_words == 15
    assert len(second.faults) == 2 and second.vagueness < 0.7
    assert [cell.text for cell in cells if cell.faults] == ["Who"]
    page.write_text("The trainer saves every step, the orchestrator reads a journal, " * 4 + "and so on.\n")
    assert len(Page(page).breaks) == 2, "too long a sentence, and too long on average"
