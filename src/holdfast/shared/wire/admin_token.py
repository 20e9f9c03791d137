"""The admin token of inference servers: read from the environment, the same on both sides, and never shown."""

from __future__ import annotations

from holdfast.shared.wire.keys import read_key


def read_admin_token(name: str) -> str | None:
    """Return the token in the environment variable `name`; None where it is not set or empty.

    Raises:
        ConfigError: it cannot stand in a header. The message does not repeat it.
    """
    return read_key(name, what="admin token")
