"""The names of docs/metrics.md, against which the metrics of real runs are held."""

import re
from collections.abc import Iterable

from tests.conftest import ROOT

_PLACEHOLDER = re.compile(r"<[a-z]+>")


def documented_names() -> list[str]:
    """Return the names that the page has a row for, with `<>`."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]


def undocumented(names: Iterable[str]) -> list[str]:
    parts = [map(re.escape, _PLACEHOLDER.split(name)) for name in documented_names()]
    patterns = [re.compile(r"[\w@/-]+".join(part)) for part in parts]
    return [name for name in names if name != "step" and not any(pattern.fullmatch(name) for pattern in patterns)]
