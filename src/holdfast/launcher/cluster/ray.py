"""A run on a Ray cluster: a placement group with a bundle for every process, and an actor in each, which is an agent.

An agent connects to the launcher, which owns the actors: Ray ends them when it dies, and the kernel ends what they have
started. Ray gives the bundles of a lost node to other nodes, or waits for one.
"""

import contextlib
import importlib
import os
import socket
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from holdfast.errors import ConfigError
from holdfast.launcher.cluster.channels import Listener, SocketChannel, close_all, listen
from holdfast.launcher.cluster.cluster import ResourceRequest, assign, wanted_and_there
from holdfast.launcher.cluster.hosts import AgentConnection, RemoteAgent, RemoteHost, serve

_CONNECT_TIMEOUT_S = 10.0
_ENDING_S = 10.0
# To follow the launcher takes a thread of the actor, `about` another one.
_CALLS_AT_ONCE = 2


class RayCluster:
    """Places processes on the nodes of a Ray cluster.

    Args:
        address: `HOST:PORT` of the head; None: the cluster of this machine.
        strategy: few nodes or many.

    Raise ConfigError if the cluster does not exist, or Ray is not installed.
    """

    def __init__(self, address: str | None, strategy: Literal["pack", "spread"]) -> None:
        self._ray = _connected(address)
        self._strategy = strategy.upper()
        self._needs: list[ResourceRequest] = []
        self._group: Any = None
        self._listener = Listener(listen(), self._take)
        self._names: dict[str, str] = {}  # by the token that an agent begins with
        self._actors: dict[str, Any] = {}
        self._channels: dict[str, SocketChannel] = {}
        self._about: dict[str, Any] = {}
        self._hosts: dict[str, RemoteHost] = {}

    @property
    def has_gpus(self) -> bool:
        return bool(self._ray.cluster_resources().get("GPU"))

    def check(self, needs: list[ResourceRequest]) -> None:
        nodes = [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        if assign(needs, nodes) is None:
            raise ConfigError(f"the Ray cluster has too few resources.\n{wanted_and_there(needs, nodes)}")
        self._needs = needs

    def place(self) -> None:
        if self._group is None:
            make = importlib.import_module("ray.util.placement_group").placement_group
            self._group = make([need.resources for need in self._needs], strategy=self._strategy)
        for number, need in enumerate(self._needs):
            channel = self._channels.get(need.name)
            if need.name not in self._actors or (channel is not None and channel.is_lost):
                self._add_place(number, need)
            self._about[need.name] = self._actors[need.name].about.remote()
        self._hosts.clear()

    def is_placed(self) -> bool:
        ready, _ = self._ray.wait(list(self._about.values()), num_returns=len(self._about), timeout=0)
        for number, need in enumerate(self._needs):
            if need.name in self._hosts or self._about[need.name] not in ready:
                continue
            try:
                about = self._ray.get(self._about[need.name])
            except self._ray.exceptions.RayActorError as error:
                _check_imports(error)
                self._add_place(number, need)
                self._about[need.name] = self._actors[need.name].about.remote()
                continue
            _check_version(about)
            if (channel := self._channels.get(need.name)) is not None:
                address = about["address"]
                self._hosts[need.name] = RemoteHost(f"{about['name']} ({address})", address, channel)
        return len(self._hosts) == len(self._needs)

    def missing(self) -> str:
        names = ", ".join(need.name for need in self._needs if need.name not in self._hosts)
        nodes = [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        available = self._ray.available_resources()
        free = ", ".join(f"{available.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if available.get(kind))
        return f"no place for {names} (free altogether: {free or 'nothing'})\n{wanted_and_there(self._needs, nodes)}"

    def host(self, name: str) -> RemoteHost:
        return self._hosts[name]

    def devices(self, name: str) -> list[int]:
        return []  # Ray assigns them

    def close(self) -> None:
        # Before the actors go: an agent ends the whole group of its process, the kernel only our processes of it.
        close_all(self._channels.values())
        self._listener.close()
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                importlib.import_module("ray.util.placement_group").remove_placement_group(self._group)
        self._ray.shutdown()

    def _add_place(self, number: int, need: ResourceRequest) -> None:
        """Have Ray start an agent, once it has room for one."""
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        strategy = scheduling.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        make: Any = self._ray.remote(_RayPlace).options(
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_restarts=0,
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=strategy,
        )
        if need.name in self._actors:
            self._ray.kill(self._actors[need.name])
        token = uuid.uuid4().hex
        self._channels.pop(need.name, None)
        self._names[token] = need.name
        self._actors[need.name] = actor = make.remote()
        actor.follow.remote(_own_address(), self._listener.port, token)

    def _take(self, channel: SocketChannel, greeting: str) -> None:
        name = self._names.pop(greeting.strip(), None)
        if name is None:  # a stranger
            channel.close()
        else:
            self._channels[name] = channel


class _RayPlace(RemoteAgent):
    def follow(self, host: str, port: int, token: str) -> None:
        """Be the agent of the launcher at this address until the connection ends."""
        with AgentConnection((host, port), token) as connection:
            serve(self, connection.lines(), connection.say)
        self.end(_ENDING_S)

    def about(self) -> dict[str, str]:
        try:
            installed = version("holdfast")
        except PackageNotFoundError:  # only on its PYTHONPATH
            installed = "without an installation"
        return {"name": socket.gethostname(), "version": installed, "address": _own_address()}


def _own_address() -> str:
    return importlib.import_module("ray.util").get_node_ip_address()


def _connected(address: str | None) -> Any:
    # Read at import: under `uv run` Ray would send this directory to every node and make an environment from it.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError(
            "cluster = 'ray' needs Ray, which is not installed: `uv sync --inexact --extra ray`, or "
            "`uv pip install 'holdfast[ray]'`, here and on every node"
        ) from None
    address = address or os.environ.get("RAY_ADDRESS") or None
    where = f"at {address}" if address else "that this machine belongs to (RAY_ADDRESS, or `ray start` on it)"
    try:
        if address and ":" in address.removeprefix("ray://"):
            # Ray itself tries for minutes.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address or "auto",
            namespace=f"holdfast-{uuid.uuid4().hex}",
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"there is no Ray cluster {where}: {reason.rstrip('.')}. The address is that of the head "
            "(`ray start --head --port 6379`: ray://HEAD:6379), and this machine must be one of the cluster's nodes."
        ) from None
    return ray


def _check_imports(error: Exception) -> None:
    text = str(error)
    if "ModuleNotFoundError" in text or "ImportError" in text:
        reason = next(line for line in reversed(text.splitlines()) if "Error" in line).strip()
        raise ConfigError(
            f"a node of the Ray cluster cannot import holdfast: {reason}. Install the same version of holdfast[ray] "
            "into the environment that Ray was started from, on every node."
        ) from None


def _check_version(about: dict[str, str]) -> None:
    if about["version"] != version("holdfast"):
        raise ConfigError(
            f"{about['name']} ({about['address']}) has holdfast {about['version']}, this machine has "
            f"{version('holdfast')}: install the same everywhere"
        )
