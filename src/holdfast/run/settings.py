"""The resolved settings of a run, read back from its files: as tables, by dotted key, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from holdfast.config import PROGRAMS
from holdfast.errors import CheckpointError
from holdfast.run import checked
from holdfast.run.run_dir import RunDir

_SECRETS = {"key", "apikey", "token", "secret", "secrets", "password", "passwd", "credentials", "authorization"}
_CREDENTIALS = re.compile(r"//[^/\s\"']*@")
_HIDDEN = "***"


def read_settings(path: Path) -> dict[str, Any]:
    """Return the resolved configuration that was written to `path`.

    Raises:
        CheckpointError: it is damaged.
    """
    data = path.read_bytes()
    try:
        if not data:
            raise ValueError("it is empty")
        checked.check_last_line(data)
        return tomli.loads(data.decode())
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are such
        way_out = "Bring it back from a copy."
        if path.parent.parent.name == "configs":  # a checkpoint without its settings is none
            way_out += (
                " A run continues without it if it is removed, with --ckpt.resume-step auto and the settings of the "
                "command."
            )
        raise CheckpointError(f"{path} is damaged: {error}. {way_out}") from None


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value. Lists are values, but not those of tables; an empty table, too, is a setting."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                flat |= flat_settings(item, f"{prefix}{key}[{number}].")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings_of_attempt(run_dir: RunDir, attempt: int) -> dict[str, Any]:
    """Return what the processes of an attempt were given; that of `rl` begin with the name of the process."""
    found: dict[str, Any] = {}
    for name in (*(program for program in PROGRAMS if program != "rl"), "trainer", "orchestrator", "inference"):
        path = run_dir.configs(attempt) / f"{name}.toml"
        if path.exists():
            prefix = "" if name in PROGRAMS else f"{name}."
            found |= {f"{prefix}{key}": value for key, value in flat_settings(read_settings(path)).items()}
    return without_secrets(found)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with `***` for what the name of a setting, or the form of a URL, says is secret."""
    return {key: _HIDDEN if _is_secret(key, value) else _without_passwords(value) for key, value in settings.items()}


def _is_secret(key: str, value: Any) -> bool:
    """Whether the last word says so: `api_key` and `HF_TOKEN`, not `admin_token_env`, which names a variable."""
    return isinstance(value, str) and re.split(r"[._\-]", key.lower())[-1] in _SECRETS


def _without_passwords(value: Any) -> Any:
    match value:
        case str():
            return _CREDENTIALS.sub(f"//{_HIDDEN}@", value)
        case list():
            return [_without_passwords(item) for item in value]
        case dict():
            return without_secrets(value)
    return value
