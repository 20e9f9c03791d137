"""The series that the dashboard and docs/console.md name, against which those of real runs are held."""

import json
import re
from typing import Any

from tests.conftest import ROOT

_NAME = re.compile(r"\b(?:holdfast_|vllm:)[a-zA-Z0-9_:]+")
_OWN = re.compile(r"^\| (`holdfast_[^|]+) \|", re.MULTILINE)


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "configs" / "grafana" / "holdfast.json").read_text())


def names_in(expression: str) -> set[str]:
    """Return the series that an expression asks for."""
    return set(_NAME.findall(expression))


def expressions_by_row() -> dict[str, list[str]]:
    """Return the expressions of the dashboard by the title of their row, in the order in which one sees them."""
    found: dict[str, list[str]] = {}
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            found[panel["title"]] = own = []
        else:
            own += [target["expr"] for target in panel["targets"]]
    return found


def names_of_rows(*rows: str) -> set[str]:
    """Return the series of some rows of the dashboard."""
    return {name for row in rows for expression in expressions_by_row()[row] for name in names_in(expression)}


def documented_series() -> set[str]:
    """Return the series that docs/console.md explains one by one."""
    page = (ROOT / "docs" / "console.md").read_text()
    return {name for cell in _OWN.findall(page) for name in re.findall(r"`(\w+)`", cell)}
