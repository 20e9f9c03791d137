"""Links of the repository's Markdown, as they have to be on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAPERS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root that are pages of the site -> where they lie there."""

_OF_ROOT = {uri: path for path, uri in PAPERS.items()} | {"llms.txt": "llms.txt"}
_FENCE = re.compile(r"^( *)```[^\n]*\n.*?^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")


class DeadLink(Exception):
    """A page links to what is not there, or cannot be on the site."""


def shipped(path: str) -> str:
    """Return where a file of the repository lies on the site."""
    return f"files/{path}"


def rewritten(text: str, uri: str, repo_url: str | None) -> str:
    """Return the Markdown of a page with links that hold on the site.

    Args:
        uri: where the page lies on the site, as mkdocs has it.
        repo_url: where the repository can be read; None: the files that are linked to lie on the site.

    Raises:
        DeadLink: a link leads nowhere, or to a directory outside of docs/ with no `repo_url` to show it.
    """
    source = _OF_ROOT.get(uri, f"docs/{uri}")

    def lead(match: re.Match[str]) -> str:
        is_picture = bool(match[1])
        return f"{match[1]}{match[2]}{_lead(match[3], source, uri, None if is_picture else repo_url)}{match[4]}"

    parts, place = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(lead, text[place : fence.start()]), fence[0]]
        place = fence.end()
    return "".join([*parts, _LINK.sub(lead, text[place:])])


def _lead(link: str, source: str, uri: str, repo_url: str | None) -> str:
    target, _, anchor = link.partition("#")
    if not target or ":" in target:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    behind = f"#{anchor}" if anchor else ""
    if path in PAPERS:
        there = PAPERS[path]
    elif path.startswith("docs/"):
        there = path.removeprefix("docs/")
    elif not (ROOT / path).exists():
        raise DeadLink(f"{source} links to {link}: there is no {path}")
    elif repo_url:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{repo_url.rstrip('/')}/{kind}/main/{path}{behind}"
    elif (ROOT / path).is_dir():
        raise DeadLink(f"{source} links to the directory {path}: link to a file of it, or set repo_url in mkdocs.yml")
    else:
        there = shipped(path)
    return posixpath.relpath(there, posixpath.dirname(uri) or ".") + behind


def files_linked_to(repo_url: str | None) -> set[str]:
    """Return the files outside of docs/ that the site has to have, for the pages that link to them."""
    found = set()
    for source, link, is_picture in _links():
        target = link.partition("#")[0]
        if target and ":" not in target and (is_picture or not repo_url):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            if not path.startswith("docs/") and path not in PAPERS and (ROOT / path).is_file():
                found.add(path)
    return found


def _links() -> Iterator[tuple[str, str, bool]]:
    """Give every link: the file that has it, its target, and whether it is a picture."""
    pages = [ROOT / paper for paper in PAPERS] + sorted((ROOT / "docs").rglob("*.md"))
    for page in pages:
        for picture, _, target, _ in _LINK.findall(_FENCE.sub("", page.read_text())):
            yield page.relative_to(ROOT).as_posix(), target, bool(picture)
