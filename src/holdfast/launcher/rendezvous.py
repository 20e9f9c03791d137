"""The rendezvous of the launchers of a run on several nodes: the address that an outer launcher gives, and the messages
there.

An outer launcher (`torchrun`, `srun`, a Kubernetes job) may start one command per node; the command forks its ranks
itself. The command reads these variables, all of one row or none:

torchrun         GROUP_RANK, GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE (1), MASTER_ADDR, MASTER_PORT
others           RANK, WORLD_SIZE (of nodes), MASTER_ADDR, MASTER_PORT, as PyTorchJobs set them
srun             SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS (the same), SLURM_STEP_NODELIST, SLURM_JOB_ID;
                 MASTER_ADDR and MASTER_PORT if they are set

`Rendezvous` exchanges short messages through a torch store on the head node, which sends to all; the other nodes send
only to the head node. A thread does this, so a host that is switched off blocks nobody else.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from holdfast.config.training import TrainingCommand, host_and_port
from holdfast.errors import ConfigError
from holdfast.process.heartbeat import awake_s

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_PERIOD_S = 0.1
_CONNECT_S = 5.0
_STORE_S = 30.0

T = TypeVar("T", bound=TrainingCommand)
_FIRST_PORT, _PORTS = 29400, 1000
_HOSTS = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<first>\d+)[^\]]*\])?(?P<suffix>[^,]*)")


@dataclass(frozen=True)
class Outer:
    """The outer launcher `name` with its nodes: HOST:PORT of the first one, and the rank of this one."""

    name: str
    nodes: int
    endpoint: str
    rank: int


def with_outer_nodes(config: T, environment: Mapping[str, str]) -> tuple[T, int | None]:
    """Return `config` with the nodes of an outer launcher, if there is one, and the rank of this node among them.

    Raises:
        ConfigError: the environment is incomplete or contradicts the settings, or several nodes have no address.
    """
    outer, parallel = outer_nodes(environment), config.parallel
    if outer is not None and outer.nodes > 1:
        if "nodes" in parallel.model_fields_set and parallel.nodes != outer.nodes:
            raise ConfigError(
                f"parallel.nodes = {parallel.nodes}, and {outer.name} starts this command on {outer.nodes} nodes: "
                "leave the setting out, or give that number."
            )
        if parallel.rdzv_endpoint is None:
            _check_endpoint(outer)
        update = {"nodes": outer.nodes, "rdzv_endpoint": parallel.rdzv_endpoint or outer.endpoint}
        # A given address decides which node is the head.
        rank = None if config.parallel.rdzv_endpoint is not None else outer.rank
        return config.model_copy(update={"parallel": parallel.model_copy(update=update)}), rank
    if parallel.nodes == 1 and parallel.rdzv_endpoint is not None:
        raise ConfigError(
            f"parallel.rdzv_endpoint = {parallel.rdzv_endpoint} is where several nodes meet, and parallel.nodes is 1: "
            "set --parallel.nodes, or leave it out."
        )
    if parallel.nodes > 1 and parallel.rdzv_endpoint is None:
        raise ConfigError(
            f"parallel.nodes = {parallel.nodes} needs the place where they meet: --parallel.rdzv-endpoint HOST:PORT, "
            f"with HOST one of them and the same on all, such as head:{_FIRST_PORT}."
        )
    return config, None


def _check_endpoint(outer: Outer) -> None:
    try:
        host_and_port(outer.endpoint)
    except ValueError as error:
        raise ConfigError(
            f"the address that {outer.name} gives its nodes {error}. Correct MASTER_ADDR and MASTER_PORT, or set "
            "--parallel.rdzv-endpoint HOST:PORT."
        ) from None


def outer_nodes(environment: Mapping[str, str]) -> Outer | None:
    """Return what an outer launcher says, if this command was started by one.

    Raises:
        ConfigError: it starts several processes on a node, or a variable of it is missing, not a number or too large.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        name = "torchrun"
        host, (rank, nodes, per_node, port) = _values(
            name, environment, "MASTER_ADDR", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"
        )
        is_alone, port = per_node == 1, port + 1  # torchrun itself listens at MASTER_PORT
    elif "RANK" in environment or "WORLD_SIZE" in environment:
        name = "the outer launcher"
        host, (rank, nodes, port) = _values(name, environment, "MASTER_ADDR", "RANK", "WORLD_SIZE", "MASTER_PORT")
        is_alone = environment.get("LOCAL_WORLD_SIZE", "1") == "1" and environment.get("LOCAL_RANK", "0") == "0"
    elif environment.get("SLURM_STEP_NUM_NODES", "1") != "1":
        name = "srun"
        hosts, (rank, nodes, tasks) = _values(
            name, environment, "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"
        )
        is_alone = tasks == nodes
        host = environment.get("MASTER_ADDR") or _first_host(hosts)
        # Jobs that share a node meet at different ports.
        _, (job,) = _values(name, {"SLURM_JOB_ID": "0", **environment}, "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
        port = environment.get("MASTER_PORT") or _FIRST_PORT + job % _PORTS
    else:
        return None
    if not is_alone:
        raise ConfigError(
            f"{name} starts several processes on a node, and this command starts its ranks itself: start one per node "
            "(torchrun --nproc-per-node 1, srun --ntasks-per-node 1), with --parallel.num-ranks."
        )
    if rank >= max(1, nodes):
        raise ConfigError(f"{name} gives this node the rank {rank}, but the ranks of {nodes} nodes end at {nodes - 1}")
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return Outer(name, nodes, f"{host}:{port}", rank)


def _values(launcher: str, environment: Mapping[str, str], text: str, *numbers: str) -> tuple[str, list[int]]:
    """Return the values of the variable `text` and of `numbers`; raise `ConfigError` if one is missing or wrong."""
    names = (*numbers, text)
    if missing := [name for name in names if not environment.get(name)]:
        raise ConfigError(
            f"{launcher} has started this command, by its environment, but {', '.join(missing)} is not set: set all "
            f"of {', '.join(names)}, or none."
        )
    for name in numbers:
        if not environment[name].isdecimal():
            raise ConfigError(f"{name} of {launcher} should be a number, got '{environment[name]}'")
    return environment[text], [int(environment[name]) for name in numbers]


def _first_host(nodes: str) -> str:
    """Return the first of a list of hosts as SLURM writes it, such as `gpu[003-004,7],head`."""
    match = _HOSTS.match(nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST should be a list of hosts, got '{nodes}'")
    return f"{match['prefix']}{match['first'] or ''}{match['suffix']}"


class Rendezvous:
    """Sends and receives messages of this node; messages are bytes.

    Args:
        address: host and port of the store.
        registration: makes what this node sends once, whenever it joins.
        hosts: whether this node has the store; unset: if the address is of this machine, and free.

    Raises:
        ConfigError: the store cannot be here.
    """

    def __init__(
        self, address: tuple[str, int], registration: Callable[[], bytes], *, hosts: bool | None = None
    ) -> None:
        self._address = address
        self._register = registration
        self._lock = threading.Lock()
        self._message = b""
        self._turns = 0  # how often a message was sent
        self._from_head = b""
        self._nodes: dict[int, tuple[bytes, bytes, float]] = {}
        self._forgotten: set[int] = set()
        self._contact_s = awake_s()
        self._was_there = False
        self._lost_number = 0
        self._ended = threading.Event()
        self._store = _open_store(address, must_host=hosts) if hosts is not False else None
        self.is_host = self._store is not None
        self.number = 0 if self.is_host else -1
        """Number of this node: 0 for the host; -1 until it has joined."""
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> int:
        """Send `message` from now on: the host to all, the others to the host; return the turn that sends it."""
        with self._lock:
            self._message = message
            return self._turns + 2  # the turn that is under way may have taken the message before

    def has_sent(self, turn: int) -> bool:
        """Whether all messages up to `turn` were sent."""
        with self._lock:
            return self._turns >= turn

    def from_head(self) -> bytes:
        """The last message of the host; empty before the first."""
        with self._lock:
            return self._from_head

    def others(self) -> dict[int, tuple[bytes, bytes, float]]:
        """At the host: registration, message, and seconds since the last turn of every other node, by number."""
        now = awake_s()
        with self._lock:
            return {
                number: (registration, message.partition(b"\n")[2], now - since)
                for number, (registration, message, since) in self._nodes.items()
            }

    def forget(self, number: int) -> None:
        """At the host: ignore the node of this number from now on."""
        with self._lock:
            self._forgotten.add(number)
            self._nodes.pop(number, None)

    def rejoin(self, number: int) -> None:
        """At another node: join again, under another number, unless that has happened since it had this `number`."""
        self._lost_number = number

    def silent_s(self) -> float:
        """Return the seconds since the last message of the host."""
        with self._lock:
            return 0.0 if self.is_host else awake_s() - self._contact_s

    @property
    def was_there(self) -> bool:
        """Whether the host ever sent a message."""
        return self.is_host or self._was_there

    def end(self) -> None:
        """Send and receive no more."""
        self._ended.set()
        self._thread.join(_PERIOD_S * 5)  # longer only where the host is away
        self._store = None

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                if not self.is_host and self.number == self._lost_number:
                    self._store = None
                store = self._store or self._join()
                if store is not None:
                    self._take_turn(store)
            except RuntimeError:  # of torch: the connection is broken
                if not self.is_host:
                    self._store = None
                    self.number = -1

    def _join(self) -> TCPStore | None:
        """Return the store of the host with a new number for this node; None if nobody answers."""
        # Tried first: torch's client writes pages to stderr if nobody answers.
        try:
            socket.create_connection(self._address, timeout=_CONNECT_S).close()
        except OSError:
            return None
        store = _store(self._address, is_master=False)
        number = store.add("holdfast/nodes", 1)
        store.set(f"holdfast/registration/{number}", self._register().decode())
        with self._lock:
            self._from_head = b""  # of a host that was there before
        self._lost_number = 0  # the numbers of a new host begin again
        self._store, self.number = store, number
        return store

    def _take_turn(self, store: TCPStore) -> None:
        with self._lock:
            turn, message = self._turns + 1, self._message
        if self.is_host:
            store.set("holdfast/head", message.decode())
            for number in range(1, store.add("holdfast/nodes", 0) + 1):
                self._listen(store, number)
        else:
            # With the number of the turn, so that every message is a heartbeat.
            store.set(f"holdfast/status/{self.number}", f"{turn}\n{message.decode()}")
            from_head = store.get("holdfast/head") if store.check(["holdfast/head"]) else b""
            with self._lock:
                self._from_head, self._contact_s, self._was_there = from_head, awake_s(), True
        with self._lock:
            self._turns = turn

    def _listen(self, store: TCPStore, number: int) -> None:
        keys = [f"holdfast/registration/{number}", f"holdfast/status/{number}"]
        if number in self._forgotten or not store.check(keys):
            return
        registration, message = store.multi_get(keys)
        with self._lock:
            if number in self._forgotten:  # meanwhile
                return
            if number not in self._nodes or self._nodes[number][1] != message:
                self._nodes[number] = (registration, message, awake_s())


def _open_store(address: tuple[str, int], *, must_host: bool | None) -> TCPStore | None:
    """Return a store here, or None if the address is of another machine, or another process has it.

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
    except OSError:  # only now: the name of a pod becomes known late
        return (
            f"this machine knows no '{host}'. Give a name or address that all nodes know, with "
            "--parallel.rdzv-endpoint, or as MASTER_ADDR of the outer launcher."
        )
    return f"{str(error).splitlines()[0]}. Choose a free port of this machine with --parallel.rdzv-endpoint."


def _store(address: tuple[str, int], *, is_master: bool) -> TCPStore:
    # Torch writes a page to stderr for each broken connection; the launcher prints which node is lost.
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    try:
        from torch.distributed import TCPStore
    finally:
        # Torch reads it once, at import; children must not inherit it.
        del os.environ["TORCH_CPP_LOG_LEVEL"]
        if before is not None:
            os.environ["TORCH_CPP_LOG_LEVEL"] = before
    timeout = timedelta(seconds=_STORE_S)
    return TCPStore(*address, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: it can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # the name is unknown
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
