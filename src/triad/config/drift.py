"""What changed in the configuration between two attempts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli

# These say where and from which step an attempt starts, not what it computes.
_OF_THE_ATTEMPT = {"output_dir", "dry_run", "clean", "ckpt.resume_step"}


def describe_drift(before: Path, after: Path) -> list[str]:
    """Return one line `key: old -> new` per setting that differs between two resolved TOML files."""
    old, new = _flat(tomli.loads(before.read_text())), _flat(tomli.loads(after.read_text()))
    return [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in _OF_THE_ATTEMPT
    ]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value. Lists are values; an empty table, too, is a setting."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(settings: dict[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "unset"
