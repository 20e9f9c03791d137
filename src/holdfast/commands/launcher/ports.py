"""Ports for inference servers: every launcher of this machine takes another one, also at the same moment.

A reservation is an abstract Unix socket with the port in its name. The kernel gives a name to one process at a time,
takes it back however that ends, and keeps names apart exactly where it keeps ports apart: by network namespace. A
server that is still loading listens nowhere yet, so nothing else could tell that its port is taken.
"""

from __future__ import annotations

import socket

from holdfast.shared.errors import ConfigError

NUM_CANDIDATES = 100
"""Ports that are tried from the first one on."""


class Reservation:
    """A port that is this process's, and that of the server that it starts or becomes, until `release` or its end."""

    def __init__(self, port: int, holder: socket.socket) -> None:
        self.port = port
        self._holder = holder

    def keep_over_exec(self) -> None:
        """Let the program that takes the place of this one keep the port."""
        self._holder.set_inheritable(True)

    def release(self) -> None:
        """Let go of the port."""
        self._holder.close()


def reserve(host: str, port: int) -> Reservation | None:
    """Reserve `port`; return None where a launcher or a server has it, or any program listens at it on `host`."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0holdfast-port-{port}".encode())
    except OSError:
        holder.close()
        return None
    reservation = Reservation(port, holder)
    # After the name is taken: two launchers that look at once must not both find it free.
    if not _can_bind(host, port):
        reservation.release()
        return None
    return reservation


def reserve_first_free(host: str, first: int, *, count: int = 1) -> list[Reservation]:
    """Reserve the first `count` free ports from `first` on that lie one behind the other.

    Raises:
        ConfigError: there are none among `NUM_CANDIDATES`.
    """
    last = min(first + NUM_CANDIDATES + count - 2, 65535)
    held: list[Reservation] = []
    for port in range(first, last + 1):
        reservation = reserve(host, port)
        if reservation is None:
            release_all(held)
        else:
            held.append(reservation)
        if len(held) == count:
            return held
    release_all(held)
    free = "no port" if count == 1 else f"not {count} ports in a row"
    raise ConfigError(
        f"{free} from {first} to {last} {'is' if count == 1 else 'are'} free on {host}. Name one with "
        "--inference.server.port, or another address with --inference.server.host."
    )


def release_all(held: list[Reservation]) -> None:
    """Let go of all ports in the list, and empty it."""
    while held:
        held.pop().release()


def _can_bind(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server binds it: connections that ended a moment ago do not matter, a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True
