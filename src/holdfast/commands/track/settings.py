"""The settings of an attempt as trackers get them: by dotted key, without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.commands.resume.config_diff import flat_settings, read_settings
from holdfast.shared.config import PROGRAMS
from holdfast.shared.files.run_dir import RunDir

_SECRETS = {"key", "apikey", "token", "secret", "secrets", "password", "passwd", "credentials", "authorization"}
_CREDENTIALS = re.compile(r"//[^/\s\"']*@")
_HIDDEN = "***"


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
