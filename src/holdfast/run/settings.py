"""The resolved settings of a run, as tables, by dotted key and without secrets; and the files that settings name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from holdfast.config import PROGRAMS
from holdfast.errors import CheckpointError, is_secret, masked
from holdfast.run import checked
from holdfast.run.manifest import MANIFEST_NAME, files_named_in
from holdfast.run.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.config.base import Command
    from holdfast.config.environments import EnvironmentConfig

_OBJECT = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_ABOUT_MODELS = ("config.json", "adapter_config.json")


def read_settings(path: Path) -> dict[str, Any]:
    """Return the resolved configuration that was written to `path`. Raise CheckpointError if it is damaged."""
    data = path.read_bytes()
    try:
        checked.check_toml(data)
        if not (settings := tomli.loads(data.decode())):
            raise ValueError("it is empty")
        return settings
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are such
        way_out = "Bring it back from a copy."
        if path.parent.parent.name == "configs":  # a checkpoint without its settings cannot be resumed
            way_out += (
                " A run continues without it if it is removed, with --ckpt.resume-step auto and the settings of the "
                "command."
            )
        raise CheckpointError(f"{path} is damaged: {error}. {way_out}") from None


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value. Lists are values, except lists of tables; an empty table, too, is a setting."""
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
    """Return the settings of the processes of an attempt; keys of `rl` begin with the name of the process."""
    found: dict[str, Any] = {}
    for name in (*(program for program in PROGRAMS if program != "rl"), "trainer", "orchestrator", "inference"):
        path = run_dir.configs(attempt) / f"{name}.toml"
        if path.exists():
            prefix = "" if name in PROGRAMS else f"{name}."
            found |= {f"{prefix}{key}": value for key, value in flat_settings(read_settings(path)).items()}
    return without_secrets(found)


def settings_of_trainers(run_dir: RunDir) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield program and settings of the trainer of each attempt, the newest first. Raise CheckpointError if settings
    are damaged."""
    for attempt in range(run_dir.next_attempt() - 1, 0, -1):
        for program in PROGRAMS:
            path = run_dir.configs(attempt) / f"{'trainer' if program == 'rl' else program}.toml"
            try:
                settings = read_settings(path)
            except FileNotFoundError:  # of another program, or a resume has just removed an old attempt
                continue
            yield program, settings


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with `***` for what the name of a setting, or the form of a URL, says is secret."""
    return {
        key: "***" if is_secret(key) and isinstance(value, str | int | list) else _without_passwords(value)
        for key, value in settings.items()
    }


def describe_variables(config: Command) -> list[str]:
    """Return a line for each setting that an environment variable gave. Lists and tables are shown by name only: they
    may hold secrets."""
    values = flat_settings(config.model_dump(mode="json", exclude_unset=True))
    lines = []
    for key, name in config.variables.items():
        shown = without_secrets({key: values[key]} if isinstance(values.get(key), str | int | float) else {})
        said = f"{key} = {json.dumps(shown[key])}" if shown else key
        lines.append(f"from the environment variable {name}: {said}")
    return lines


def _without_passwords(value: Any) -> Any:
    match value:
        case str():
            return masked(value)
        case list():
            return [_without_passwords(item) for item in value]
        case dict():
            return without_secrets(value)
    return value


def files_of_environment(section: EnvironmentConfig) -> dict[str, Path]:
    """Return the files that an environment's settings name: data, programs of MCP servers, modules with its code. For a
    module this is its own file, without its imports."""
    servers = {name: {"command": server.command, "args": server.args} for name, server in section.mcp_servers.items()}
    levels = section.curriculum.levels if section.curriculum is not None else []
    found = dict(files_named_in(section.args))
    found |= files_named_in({"levels": levels}, "curriculum.")
    found |= files_named_in(servers, "mcp_servers.")
    for key, name in _texts({"id": section.id, "args": section.args, "curriculum": {"levels": levels}}, ""):
        if (path := file_of_object(name)) is not None:
            found[f"{key} = {name}"] = path
    return found


def file_of_object(name: str) -> Path | None:
    """Return the file of the module of `module:name`; None if the text has another form or the file is missing."""
    from holdfast.process.imports import module_file  # readers of settings do not need it

    matched = _OBJECT.fullmatch(name)
    return module_file(matched[1]) if matched else None


def files_of_model(directory: Path, *, has_weights: bool) -> list[Path]:
    """Return the files that say what a model computes; none of a model of the hub. `has_weights`: the files of its
    weights as well, or of a checkpoint."""
    names = (*_ABOUT_MODELS, MANIFEST_NAME) if has_weights else _ABOUT_MODELS
    named = [path for name in names if (path := directory / name).is_file()]
    return [*named, *(sorted(directory.glob("*.safetensors")) if has_weights else [])]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of texts at any depth."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _texts(one, f"{key}.{place}")
