"""The commands of a training run on several nodes: the head node leads the run, the other nodes are its agents.

The head node is the host of `parallel.rdzv_endpoint`. Its command prepares the run as the command of a run on one node
does, and starts a trainer on every node (`holdfast.launcher.restarts`). The command of another node connects to the
head node, and starts and ends processes for it: see `holdfast.launcher.cluster.hosts`. A node without the head node
ends its trainer, and waits for the head node to return. Both sides send a line every second; a silent side is lost.

Two nodes train one run together only with the same code, settings and run directory.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import tomli
import xxhash

from holdfast.config.load import to_toml
from holdfast.config.training import ParallelConfig, TrainingCommand
from holdfast.errors import ConfigError, HoldfastError, NodeLost, ProcessDied
from holdfast.launcher.cluster.channels import Listener, SocketChannel, close_all, listen
from holdfast.launcher.cluster.cluster import trainer_names
from holdfast.launcher.cluster.hosts import AgentConnection, RemoteAgent, RemoteHost, RemoteProcess, serve
from holdfast.launcher.resume.config_diff import changed_settings
from holdfast.process.heartbeat import awake_s
from holdfast.run.lock import Holder
from holdfast.run.run_dir import RunDir
from holdfast.trainer.launch import ENDPOINT_ENV, NODE_RANK_ENV

_POLL_S = 0.1
_ENDING_S = 10.0


class Registration(msgspec.Struct, frozen=True):
    """A node's first line.

    Attributes:
        code: digest of the installed code.
        settings: as TOML, which has numbers that JSON has not.
        rank: of the node, from an outer launcher; -1 without.
        run_id: the run that it trains already; empty for none.
    """

    holder: Holder
    code: str
    output_dir: str
    settings: str
    rank: int = -1
    run_id: str = ""

    @classmethod
    def of(cls, config: TrainingCommand, rank: int | None) -> Registration:
        """Return the registration of this node."""
        place = str(RunDir(config.output_dir).path)
        return cls(Holder.me(), digest_of_code(), place, to_toml(config), -1 if rank is None else rank)

    @property
    def name(self) -> str:
        return f"{self.holder.host} (process {self.holder.pid})"


class LastWords(msgspec.Struct, frozen=True):
    """The head node's last line to a node: how the run has ended, or why the node may not take part (`refused`)."""

    code: int
    message: str = ""
    refused: bool = False

    @property
    def line(self) -> str:
        """The text that is sent."""
        return msgspec.json.encode(self).decode()

    def exit_code(self) -> int:
        """Return the exit code of the node. Raise ConfigError if it was refused, ProcessDied if the run failed."""
        if self.refused:
            raise ConfigError(self.message)
        if self.message:
            raise ProcessDied(f"the run has ended on node {self.message}", exit_code=self.code)
        return self.code


def why_not_together(ours: Registration, theirs: Registration) -> str:
    """Return why the node of `theirs` cannot take part in the run of `ours`, naming both; empty if it can."""
    here, there = ours.name, theirs.name
    if theirs.code != ours.code:
        return (
            f"nodes run other code: {_version(ours.code)} on {here}, {_version(theirs.code)} on {there}. Install the "
            "same on all."
        )
    differing = changed_settings(tomli.loads(ours.settings), tomli.loads(theirs.settings), TrainingCommand)
    if differing:
        lines = "\n  ".join(sorted(differing.values()))
        return (
            f"nodes were started with other settings ({here} -> {there}):\n  {lines}\nStart the same command on every "
            "node."
        )
    if theirs.output_dir != ours.output_dir:
        return (
            f"nodes write to other directories: {ours.output_dir} on {here}, {theirs.output_dir} on {there}. Name one "
            "that all share, by its whole path, with --output-dir."
        )
    return ""


def digest_of_code() -> str:
    """Return the installed versions and a digest of the source, which tells checkouts of one version apart."""
    digest = xxhash.xxh3_64()
    root = Path(__file__).parents[1]  # of the package
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{version('holdfast')} {version('torch')} {digest.hexdigest()}"


def _version(code: str) -> str:
    ours, torch, digest = code.split()
    return f"holdfast {ours} (source {digest[:8]}) with torch {torch}"


# --- the head node


class _NodeHost(RemoteHost):
    """The host of another node, where processes have the environment and the directory of the node's command."""

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> RemoteProcess:
        return self._start(argv, log, environment, os.curdir)


class Nodes:
    """The nodes of a run, at the head node: places for its trainers, as `Cluster`; a context manager. `registration`:
    of the head node, with which the registrations of the others must agree."""

    def __init__(self, server: socket.socket, parallel: ParallelConfig, registration: Registration) -> None:
        self._parallel, self._ours = parallel, registration
        self._lock = threading.Lock()
        self._nodes: dict[SocketChannel, Registration] = {}
        self._placed: list[tuple[SocketChannel, Registration]] = []
        self._words = LastWords(1)
        self._listener = Listener(server, self._register)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end(self, code: int, message: str = "") -> None:
        """Say how the run has ended, for `close` to pass on: the exit code, and an error if it failed."""
        self._words = LastWords(code, message and f"{self._ours.name}: {message}")

    def close(self) -> None:
        """Tell all nodes how the run has ended; their trainers end."""
        self._listener.close()
        for channel in (there := self._there()):
            channel.tell(self._words.line)
        close_all(there)

    def _register(self, channel: SocketChannel, greeting: str) -> None:
        """Take a node in, or refuse it."""
        try:
            theirs = msgspec.json.decode(greeting, type=Registration)
            reason = why_not_together(self._ours, theirs)
        except ValueError as error:  # of another version
            theirs, reason = self._ours, f"nodes run other code: {self._ours.name} does not understand a node ({error})"
        if reason:
            print(f"refused: {reason}", flush=True)
            channel.tell(LastWords(2, reason, refused=True).line)
            channel.close()
            return
        with self._lock:
            self._nodes[channel] = theirs

    def _there(self) -> dict[SocketChannel, Registration]:
        with self._lock:
            self._nodes = {channel: node for channel, node in self._nodes.items() if not channel.is_lost}
            return dict(self._nodes)

    def place(self) -> None:
        """Do nothing: nodes come by themselves."""

    def is_placed(self) -> bool:
        """Whether there is a node for every trainer; further nodes wait until one is lost."""
        there, count = self._there(), self._parallel.nodes - 1
        kept = [channel for channel, _ in self._placed if channel in there]
        chosen = [*kept, *(channel for channel in there if channel not in kept)][:count]
        chosen.sort(key=lambda one: (there[one].rank, there[one].holder.host))
        self._placed = [(channel, there[channel]) for channel in chosen]
        return len(self._placed) == count

    def missing(self) -> str:
        host, port = self._parallel.rendezvous
        there = 1 + len(self._there())
        return f"{there} of {self._parallel.nodes} nodes are here: waiting for the others at {host}:{port}"

    def host(self, name: str) -> RemoteHost:
        return self.hosts()[name]

    def hosts(self) -> dict[str, RemoteHost]:
        """Return the hosts of the trainers beside the head node's, by name."""
        names = trainer_names(self._parallel.nodes)[1:]
        return {
            name: _NodeHost(node.name, node.holder.host, channel)
            for name, (channel, node) in zip(names, self._placed, strict=True)
        }

    def environments(self) -> dict[str, dict[str, str]]:
        """Return what tells each trainer its rank and where all meet, by name."""
        host = self._parallel.rendezvous[0]
        host = f"[{host}]" if ":" in host else host
        endpoint = f"{host}:{_free_port()}"  # a new port: the store of the attempt before must not be found
        names = trainer_names(self._parallel.nodes)
        return {name: {NODE_RANK_ENV: str(rank), ENDPOINT_ENV: endpoint} for rank, name in enumerate(names)}

    def trains(self, run_dir: RunDir) -> bool:
        """Whether a node trains this run already: then the head node was lost, and continues the run."""
        if not run_dir.holds_run():
            return False
        run_id = run_dir.run_id()
        return any(node.run_id == run_id for node in self._there().values())

    def asked_to_stop(self) -> int | None:
        """Return the signal that came to the command of another node, if any."""
        return next((channel.signal for channel in self._there() if channel.signal is not None), None)


def meet(parallel: ParallelConfig, rank: int | None) -> socket.socket | None:
    """Return where the nodes connect to; None: another node is the head. `rank`: of this node, from an outer launcher:
    0 is the head. None: the head is the host of the address. Raise ConfigError if this node must be the head, and
    cannot listen at the address."""
    host, port = parallel.rendezvous
    if rank is not None and rank > 0:
        return None
    is_here = _is_here(host)
    if rank is None and is_here is not True:
        return None
    if isinstance(is_here, OSError):
        raise ConfigError(
            f"nodes cannot meet at {host}:{port}: this machine knows no '{host}'. Give a name or address that all "
            "nodes know, with --parallel.rdzv-endpoint, or as MASTER_ADDR of the outer launcher."
        )
    try:
        return listen(port)
    except OSError as error:
        if rank is None and error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(
            f"nodes cannot meet at {host}:{port}: {error.strerror}. Choose a free port of this machine with "
            "--parallel.rdzv-endpoint."
        ) from None


def _is_here(host: str) -> bool | OSError:
    """Return whether `host` is an address of this machine, which can be bound; the error of an unknown name."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# --- the other nodes


class Follower:
    """The command of a node beside the head node's: the agent of the head node, until the run is over.

    Args:
        environment: of its trainer.
        came: gets the signals that come to this command.
    """

    def __init__(
        self, config: TrainingCommand, registration: Registration, environment: Mapping[str, str], came: list[int]
    ) -> None:
        self._parallel, self._run_dir = config.parallel, RunDir(config.output_dir)
        self._registration, self._came = registration, came
        self._agent = RemoteAgent(environment)

    def run(self) -> int:
        """Return the exit code. Raise NodeLost if the head node does not come, or come back, in time; ConfigError if
        this node may not take part; ProcessDied if the run failed."""
        host, port = self._parallel.rendezvous
        said, since = f"waiting for the head node, at {host}:{port}", awake_s()
        print(said, flush=True)
        while True:
            if self._came:
                return 128 + self._came[0]
            with suppress(OSError), self._connected() as connection:
                try:
                    last = serve(self._agent, connection.lines(self._came), connection.say)
                    words = msgspec.convert(last, LastWords | None)
                except ValueError:
                    raise ConfigError(
                        f"{host}:{port} is where another program answers: choose another --parallel.rdzv-endpoint"
                    ) from None
                finally:  # whatever ended the connection
                    self._agent.end(_ENDING_S)
                    since = awake_s() if connection.was_heard else since
                if words is not None:
                    code = words.exit_code()
                    print(f"the head node ended the run with exit code {code}", flush=True)
                    return code
                if connection.was_heard:  # else the head node is frozen
                    said = f"the head node, {host}, is lost: waiting for its command to be started again"
                    print(said, flush=True)
            if awake_s() - since > (timeout_s := self._parallel.rdzv_timeout_s):
                raise NodeLost(in_vain(timeout_s, said))
            time.sleep(_POLL_S)

    def _connected(self) -> AgentConnection:
        run_id = ""
        with suppress(OSError, HoldfastError):  # as the head node begins the run
            run_id = self._run_dir.run_id() if self._agent.has_started else ""
        joins = msgspec.structs.replace(self._registration, run_id=run_id)
        return AgentConnection(self._parallel.rendezvous, msgspec.json.encode(joins).decode())


def in_vain(timeout_s: float, waited_for: str) -> str:
    """Return the message of a wait for other nodes that is over."""
    return (
        f"waited in vain for {timeout_s:g} s (parallel.rdzv_timeout_s): {waited_for}. Start the same command on every "
        "node; what was committed is whole."
    )
