"""Ports for what tests start."""

import secrets
import socket
from pathlib import Path

_FIRST_PORT = 12_000  # behind the ones that programs are known by
_ENOUGH = 1000


def free_port(count: int = 1) -> int:
    """Return a TCP port that nothing listens on, that no other test has, and that nothing gets by asking for any. Of
    `count` such ports that lie one behind the other it is the first. What a test starts may bind it much later: the
    system would have given a port of its own range to somebody else, and tests in other processes or clones draw from
    the same range. So each port is taken until this process ends."""
    ours = _range()
    while True:
        first = ours[secrets.randbelow(len(ours) - count)]
        ports = range(first, first + count)
        if all(_is_free(port) for port in ports) and all(_take(port) for port in ports):
            return first


def _range() -> range:
    """Return the ports that the system gives to nobody who asks for any, unless it gives almost all."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first_given, last_given = int(given[0]), int(given[1])
    if first_given - _FIRST_PORT >= _ENOUGH:
        return range(_FIRST_PORT, first_given)
    return range(last_given + 1 if 65_536 - last_given > _ENOUGH else _FIRST_PORT, 65_536)


def _take(port: int) -> bool:
    """Bind a name that the kernel keeps as long as this process, or a fork of it, is there; False if it is taken."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0holdfast-test-port-{port}")
    except OSError:
        sock.close()
        return False
    sock.detach()
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
