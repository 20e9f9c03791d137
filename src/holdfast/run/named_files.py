"""The files that settings name, by where they name them: what an environment plays with, and a model is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.config.environments import EnvironmentConfig
from holdfast.process.imports import module_file
from holdfast.run.manifest import MANIFEST_NAME, files_named_in

ENVIRONMENTS_GROUP = "holdfast.environments"
"""Of the entry points by which installed packages bring environments."""
_OBJECT = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_ABOUT_MODELS = ("config.json", "adapter_config.json")


def files_of_environment(section: EnvironmentConfig) -> dict[str, Path]:
    """Return the files that an environment's settings name: data, programs of MCP servers, modules with its code.

    Of a module it is the file of its own, not those that it imports.
    """
    servers = {name: {"command": server.command, "args": server.args} for name, server in section.mcp_servers.items()}
    levels = section.curriculum.levels if section.curriculum is not None else []
    found = dict(files_named_in(section.args))
    found |= files_named_in({"levels": levels}, "curriculum.")
    found |= files_named_in(servers, "mcp_servers.")
    named = {"id": section.id} if ":" in section.id else {"id": _plugin(section.id)}
    for key, name in _texts({**named, "args": section.args, "curriculum": {"levels": levels}}, ""):
        if (path := file_of_object(name)) is not None:
            found[f"{key} = {name}"] = path
    return found


def _plugin(name: str) -> str:
    """Return the `module:Class` of the environment that an installed package brings under a name; else the name."""
    from importlib.metadata import entry_points  # few processes come here

    found = [entry.value for entry in entry_points(group=ENVIRONMENTS_GROUP, name=name)]
    return found[0] if found else name


def file_of_object(name: str) -> Path | None:
    """Return the file of the module of `module:name`; None for another text, and where there is no such file."""
    matched = _OBJECT.fullmatch(name)
    return module_file(matched[1]) if matched else None


def files_of_model(directory: Path, *, has_weights: bool) -> list[Path]:
    """Return the files that say what a model computes; none of a model of the hub.

    Args:
        has_weights: the files of its weights as well, or of a checkpoint.
    """
    names = (*_ABOUT_MODELS, MANIFEST_NAME) if has_weights else _ABOUT_MODELS
    named = [path for name in names if (path := directory / name).is_file()]
    return [*named, *(sorted(directory.glob("*.safetensors")) if has_weights else [])]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the texts at any depth, and where they are."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _texts(one, f"{key}.{place}")
