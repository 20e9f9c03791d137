"""The hooks of mkdocs (mkdocs.yml names this file).

The site has the pages of docs/ and, besides:

- README.md as its first page, and the project's other papers (`PAPERS`),
- one page per command, and one of all settings, see `docs_tools.options`; the JSON schema of their TOML files,
- the page of the Python API, see `docs_tools.api`,
- the files of the repository that a page links to, where no `repo_url` is set to lead there instead,
- llms.txt.

`commands/*` in the navigation stands for the pages of all commands.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs_tools import api, links, listing, options  # noqa: E402

_FENCE_INFO = re.compile(r"^( *```)(\w+)[ \t]+([^\n]+)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out the entries of the navigation that stand for many pages."""
    below = {"commands/*": [{name: f"commands/{name}.md"} for name in options.COMMANDS]}
    config.nav = _written_out(config.nav, below)
    return config


def _written_out(entries: Any, below: dict[str, list[Any]]) -> list[Any]:
    written: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and entry in below:
            written += below[entry]
        elif isinstance(entry, dict):
            written.append({k: _written_out(v, below) if isinstance(v, list) else v for k, v in entry.items()})
        else:
            written.append(entry)
    return written


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for paper, uri in links.PAPERS.items():
        files.append(File.generated(config, uri, content=(ROOT / paper).read_text()))
    for name in options.COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=options.page(name)))
    files.append(File.generated(config, "commands/index.md", content=options.index()))
    files.append(File.generated(config, "python_api/index.md", content=api.page()))
    for name in listing.SETTINGS:
        files.append(File.generated(config, f"schemas/{name}.json", content=listing.json_schema(name)))
    llms = links.rewritten((ROOT / "llms.txt").read_text(), "llms.txt", config.repo_url)
    files.append(File.generated(config, "llms.txt", content=llms.replace(".md)", ".html)")))
    for path in sorted(links.files_linked_to(config.repo_url)):
        files.append(File.generated(config, links.shipped(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets lie on the site, and leave words behind a fence to the tests."""
    markdown = links.rewritten(markdown, page.file.src_uri, config.repo_url)
    return _FENCE_INFO.sub(_fence, markdown)


def _fence(match: re.Match[str]) -> str:
    """Turn `file=NAME` and its like into a title."""
    title = re.search(r"\b(?:file|add|of)=(\S+)", match[3])
    return f'{match[1]}{match[2]} title="{title[1]}"' if title else f"{match[1]}{match[2]}"
