"""Keys that go with requests: read from the environment, and never shown."""

from __future__ import annotations

import os

from holdfast.shared.errors import ConfigError


def read_key(name: str, *, what: str = "key") -> str | None:
    """Return the key in the environment variable `name`; None where it is not set or empty.

    Args:
        what: it is called in the message.

    Raises:
        ConfigError: it cannot stand in a header. The message does not repeat it.
    """
    key = os.environ.get(name, "")
    if not key:
        return None
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"the {what} in the environment variable {name} holds spaces, line breaks or characters beyond ASCII, "
            f"which no header can hold. A file that ends with a line break gives one: use {name}=$(cat FILE)."
        )
    return key
