"""The hints for unknown flags and keys: by their names in other systems (`elsewhere.toml`), or by spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import tomli

_FILE = Path(__file__).with_name("elsewhere.toml")
_SIMILAR = 0.75


@cache
def names_elsewhere() -> dict[str, Any]:
    """Return the name of a setting in another system -> `settings` here, what is `said` without any of them,
    and in some what is said `beside` the one that is there."""
    return tomli.loads(_FILE.read_text())


def hint(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, a sentence with a space before it, or an empty string for an unknown setting.

    Args:
        name: dotted, with or without dashes, as it was given.
        known: the dotted keys of the command.
    """
    keys = list(known)
    given = name.lstrip("-").replace("-", "_").lower()
    parts, names = given.split("."), names_elsewhere()
    for begin in range(len(parts)):
        entry = names.get(".".join(parts[begin:]))
        if entry is None:
            continue
        said = entry["said"]
        found = next((one for one in entry["settings"] if one in keys and one != given), None)
        beside = f" {entry['beside']}." if "beside" in entry else ""
        return f" Did you mean '{_as_given(found, name)}'?{beside}" if found else f" Here {said}." if said else ""
    by_end = sorted((one for one in keys if one.rpartition(".")[2] == parts[-1]), key=lambda one: (len(one), one))
    if by_end:
        return f" Did you mean {' or '.join(repr(_as_given(one, name)) for one in by_end[:3])}?"
    similar = difflib.get_close_matches(given, keys, n=1, cutoff=_SIMILAR)
    similar = similar or difflib.get_close_matches(parts[-1], [one for one in keys if "." not in one], 1, _SIMILAR)
    return f" Did you mean '{_as_given(similar[0], name)}'?" if similar else ""


def _as_given(key: str, name: str) -> str:
    return f"--{key.replace('_', '-')}" if name.startswith("--") else key
