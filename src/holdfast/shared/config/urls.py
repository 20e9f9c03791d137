"""What the URL of a server may be, and which names are this machine's."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def check_url(url: str) -> None:
    """Refuse what is not the base URL of a server; nothing of it is repeated, because it may hold a password."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an end, a port that is no number
        parts, usable = None, False
    if parts is None or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must be URLs such as http://127.0.0.1:8000")
    if parts.scheme not in ("http", "https"):
        raise ValueError("must begin with http:// or https://, such as http://127.0.0.1:8000")
    if not usable:
        raise ValueError("must name a server, such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "must not hold a user name or password, which would be kept with the run's settings and logs: the servers "
            "take an admin token, see admin_token_env"
        )
    if parts.query or parts.fragment:
        raise ValueError("must end with the path that comes before /health, without '?' and '#'")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(header: str) -> bool:
    """Whether a Host header names this machine, for this machine alone. One without it is no browser's."""
    if not header:
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name.removesuffix("."))
