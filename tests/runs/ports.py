"""Ports for what tests start."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_FIRST_PORT = 12_000  # behind the ones that programs are known by


def free_port(count: int = 1) -> int:
    """Return a TCP port that nothing listens on, and that nothing gets by asking for any port.

    Of `count` such ports that lie one behind the other it is the first.

    What a test starts may bind it much later: the system would have given a port of its own range to somebody else.
    """
    first_of_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.randbelow(first_of_any - _FIRST_PORT - count) + _FIRST_PORT
        if all(_is_free(port + number) for number in range(count)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
