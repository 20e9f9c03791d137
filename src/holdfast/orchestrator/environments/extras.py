"""Libraries that only some environments need: imported when one is made, or refused with what installs them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from holdfast.shared.errors import ConfigError


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Return the module of an extra of holdfast.

    Raises:
        ConfigError: it is not installed; says which command installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(
            f"{needed_by} needs the extra '{extra}', which is not installed: `uv sync --extra {extra}` in a checkout, "
            f"or `pip install 'holdfast[{extra}]'` where holdfast is installed (see docs/installation.md)"
        ) from None
