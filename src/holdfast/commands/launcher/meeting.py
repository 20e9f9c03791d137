"""The exchange of short messages between the commands of one run on several nodes, through a store of torch.

One of them has the store and speaks to all; each of the others speaks to that one. A thread does it, so that a host
that is switched off stops nobody else: what counts is when it was heard last.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.shared.errors import ConfigError
from holdfast.shared.process.clock import awake_s

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_PERIOD_S = 0.1
_CONNECT_S = 5.0
_STORE_S = 30.0


class Meeting:
    """What is said and heard here; messages are bytes, of whatever form.

    Args:
        address: host and port of the store.
        hello: makes what this node says of itself once, whenever it comes to the meeting.
        hosts: whether the store is to be here; unset: where the address is one of this machine, and free.

    Raises:
        ConfigError: the store cannot be here.
    """

    def __init__(self, address: tuple[str, int], hello: Callable[[], bytes], *, hosts: bool | None = None) -> None:
        self._address = address
        self._hello = hello
        self._lock = threading.Lock()
        self._word = b""
        self._said = 0  # how often it was taken along
        self._lead = b""
        self._hellos: dict[int, bytes] = {}
        self._words: dict[int, tuple[bytes, float]] = {}
        self._forgotten: set[int] = set()
        self._contact_s = awake_s()
        self._was_there = False
        self._comes_again = False
        self._ended = threading.Event()
        self._store = _open_store(address, must_host=hosts) if hosts is not False else None
        self.is_host = self._store is not None
        self.number = 0 if self.is_host else -1
        """Of this node at the meeting: 0 of the host; -1 while it has none."""
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self._thread.start()

    def say(self, word: bytes) -> int:
        """Say `word` from now on: the host to all, the others to the host; return the turn in which it is said."""
        with self._lock:
            self._word = word
            return self._said + 2  # the turn that is under way may have taken the word before

    def has_said(self, turn: int) -> bool:
        """Whether what was to be said by `turn` has been."""
        with self._lock:
            return self._said >= turn

    def lead(self) -> bytes:
        """What the host says; empty while it has not been heard."""
        with self._lock:
            return self._lead

    def others(self) -> dict[int, tuple[bytes, bytes, float]]:
        """At the host: hello, word, and seconds since the last sign of life of every other node, by number."""
        now = awake_s()
        with self._lock:
            return {
                number: (hello, *self._heard(number, now))
                for number, hello in self._hellos.items()
                if number not in self._forgotten
            }

    def _heard(self, number: int, now: float) -> tuple[bytes, float]:
        word, since = self._words[number]
        return word.partition(b"\n")[2], now - since

    def forget(self, number: int) -> None:
        """At the host: listen to the node of this number no more."""
        with self._lock:
            self._forgotten.add(number)

    def come_again(self) -> None:
        """At another node: come to the meeting anew, under another number."""
        self._comes_again = True

    def silent_s(self) -> float:
        """Return for how long the host has not been heard."""
        with self._lock:
            return 0.0 if self.is_host else awake_s() - self._contact_s

    @property
    def was_there(self) -> bool:
        """Whether the host was ever heard."""
        return self.is_host or self._was_there

    def end(self) -> None:
        """Say and hear no more."""
        self._ended.set()
        self._thread.join(_PERIOD_S * 5)  # longer only where the host is away
        self._store = None

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                if self._comes_again:
                    self._comes_again, self._store = False, None
                store = self._store or self._come()
                if store is not None:
                    self._take_turn(store)
            except RuntimeError:  # of torch: the connection is broken
                if not self.is_host:
                    self._store = None
                    self.number = -1

    def _come(self) -> TCPStore | None:
        """Come to the meeting anew; return its store, if it is there."""
        # Asked by ourselves first: torch's client writes pages to stderr where nobody answers.
        try:
            socket.create_connection(self._address, timeout=_CONNECT_S).close()
        except OSError:
            return None
        store = _store(self._address, is_master=False)
        number = store.add("holdfast/nodes", 1)
        store.set(f"holdfast/hello/{number}", self._hello().decode())
        with self._lock:
            self._lead = b""  # of a host that was there before
        self._store, self.number = store, number
        return store

    def _take_turn(self, store: TCPStore) -> None:
        with self._lock:
            turn, word = self._said + 1, self._word
        if self.is_host:
            store.set("holdfast/lead", word.decode())
            for number in range(1, store.add("holdfast/nodes", 0) + 1):
                self._listen(store, number)
        else:
            # With the number of the turn: that it changes is the sign of life.
            store.set(f"holdfast/word/{self.number}", f"{turn}\n{word.decode()}")
            lead = store.get("holdfast/lead") if store.check(["holdfast/lead"]) else b""
            with self._lock:
                self._lead, self._contact_s, self._was_there = lead, awake_s(), True
        with self._lock:
            self._said = turn

    def _listen(self, store: TCPStore, number: int) -> None:
        keys = [f"holdfast/hello/{number}", f"holdfast/word/{number}"]
        if number in self._forgotten or not store.check(keys):
            return
        hello, word = store.multi_get(keys)
        with self._lock:
            self._hellos[number] = hello
            if number not in self._words or self._words[number][0] != word:
                self._words[number] = (word, awake_s())


def _open_store(address: tuple[str, int], *, must_host: bool | None) -> TCPStore | None:
    """Return a store here, or None where the address is another machine's, or another process has it.

    Raises:
        ConfigError: it must be here, and cannot.
    """
    host, port = address
    if must_host is None and not _is_here(host):
        return None
    try:
        return _store(address, is_master=True)
    except RuntimeError as error:
        if must_host is None and is_taken(port):
            return None
        raise ConfigError(f"nodes cannot meet at {host}:{port}: {_why_not(host, error)}") from None


def _why_not(host: str, error: RuntimeError) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # said now alone: the name of a pod becomes known late
        return (
            f"this machine knows no '{host}'. Give a name or address that all nodes know, with "
            "--parallel.rdzv-endpoint, or as MASTER_ADDR of the outer launcher."
        )
    return f"{str(error).splitlines()[0]}. Choose a free port of this machine with --parallel.rdzv-endpoint."


def _store(address: tuple[str, int], *, is_master: bool) -> TCPStore:
    # Where a connection breaks, torch writes a page for each to stderr; who is lost is told by us.
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    try:
        from torch.distributed import TCPStore
    finally:
        # Read once, at the import: the processes that are started from here shall have their own.
        del os.environ["TORCH_CPP_LOG_LEVEL"]
        if before is not None:
            os.environ["TORCH_CPP_LOG_LEVEL"] = before
    timeout = timedelta(seconds=_STORE_S)
    return TCPStore(*address, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: then, and only then, it can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # no such name: said by whoever waits for it
        return False
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def is_taken(port: int) -> bool:
    """Whether a process of this machine listens at `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """Return a port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
