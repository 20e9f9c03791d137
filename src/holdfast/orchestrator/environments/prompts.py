"""What built-in environments ask: the user's own words around what is different in each task."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.shared.errors import ConfigError


def require_placeholders(prompt: str, names: Sequence[str], *, environment: str) -> None:
    """Check that `prompt` says everything that a task is about.

    Raises:
        ConfigError: one of `names` does not stand in braces in it.
    """
    missing = [f"{{{name}}}" for name in names if f"{{{name}}}" not in prompt]
    if missing:
        raise ConfigError(
            f"{environment}: prompt = {prompt!r} leaves out {', '.join(missing)}, so nobody could solve its tasks; "
            "write it where it belongs"
        )


def filled(prompt: str, **values: str) -> str:
    """Return `prompt` with each {name} replaced; other braces stand for themselves."""
    for name, value in values.items():
        prompt = prompt.replace(f"{{{name}}}", value)
    return prompt
