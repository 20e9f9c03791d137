"""The admin token of inference servers: read from the environment, the same on both sides, and never shown."""

from __future__ import annotations

import os

from holdfast.shared.errors import ConfigError


def read_admin_token(name: str) -> str | None:
    """Return the token in the environment variable `name`; None where it is not set or empty.

    Raises:
        ConfigError: it cannot stand in a header. The message does not repeat it.
    """
    token = os.environ.get(name, "")
    if not token:
        return None
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"the admin token in the environment variable {name} holds spaces, line breaks or characters beyond ASCII, "
            f"which no header can hold. A file that ends with a line break gives one: use {name}=$(cat FILE)."
        )
    return token
