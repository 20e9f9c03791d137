"""Ports for what tests start."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

_FIRST_PORT = 12_000  # behind the ones that programs are known by
_given: set[int] = set()


def free_port(count: int = 1) -> int:
    """Return a TCP port that nothing listens on, that was not returned before, and that nothing gets by asking for any.

    Of `count` such ports that lie one behind the other it is the first.

    What a test starts may bind it much later: the system would have given a port of its own range to somebody else,
    and another worker of this pytest draws from a range of its own.
    """
    ours = _range_of_this_worker()
    while True:
        first = ours[secrets.randbelow(len(ours) - count)]
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and all(_is_free(port) for port in ports):
            _given.update(ports)
            return first


def _range_of_this_worker() -> range:
    first_of_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    width = (first_of_any - _FIRST_PORT) // workers
    return range(_FIRST_PORT + number * width, _FIRST_PORT + (number + 1) * width)


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
