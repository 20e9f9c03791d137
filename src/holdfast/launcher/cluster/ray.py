"""A run on a Ray cluster: a placement group with a bundle for every process, and an actor in each.

The launcher owns the actors, so Ray ends them when it dies, and the kernel ends what they have started. Ray gives the
bundles of a lost node to other nodes, or waits for one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import uuid
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from holdfast.errors import ConfigError, HoldfastError
from holdfast.launcher.cluster.cluster import ResourceRequest, assign, wanted_and_there
from holdfast.launcher.cluster.hosts import CALL_TIMEOUT_S, HostLost, RemoteAgent, RemoteHost
from holdfast.process.heartbeat import awake_s

_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0
# Waiting for the end of a process takes a thread of the actor, a call another one.
_CALLS_AT_ONCE = 4


class RayChannel:
    """The connection to an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self.actor = actor
        self._started: Any = None
        self._end: Any = None
        self._posted: list[tuple[Any, float]] = []
        self._lost: HostLost | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        return self._get(getattr(self.actor, method).remote(*arguments))

    def post(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "start":
            reference = self._started = self.actor.start.remote(*arguments)
            self._end = self.actor.behind.remote(self._started, "wait")
        else:
            reference = self.actor.behind.remote(self._started, method, *arguments)
        self._posted.append((reference, awake_s() + CALL_TIMEOUT_S))
        return reference.future()

    def ended(self) -> int | None:
        if self._lost is not None:
            raise self._lost
        if self._is_there(self._end):
            return self._get(self._end)
        self._posted = [(call, due_s) for call, due_s in self._posted if not self._is_there(call)]
        if self._posted and awake_s() > self._posted[0][1]:
            raise self.lose()
        return None

    @property
    def asked(self) -> list[Any]:
        """The calls without an answer."""
        return [call for call, _ in self._posted]

    def lose(self) -> HostLost:
        self._ray.kill(self.actor)
        self._lost = HostLost("it does not answer")
        return self._lost

    def _is_there(self, reference: Any) -> bool:
        ready, _ = self._ray.wait([reference], timeout=0)
        return bool(ready)

    def _get(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=CALL_TIMEOUT_S)
        except errors.RayTaskError as error:
            # Only the original error has the number of a full disk.
            if isinstance(error.cause, HoldfastError | OSError):
                raise error.cause from None
            raise
        except errors.RayError as error:
            raise HostLost(f"Ray says {type(error).__name__}") from None


class RayCluster:
    """Places processes on the nodes of a Ray cluster.

    Args:
        address: `HOST:PORT` of the head; None: the cluster of this machine.
        strategy: few nodes or many.

    Raises:
        ConfigError: the cluster does not exist, or Ray is not installed.
    """

    def __init__(self, address: str | None, strategy: Literal["pack", "spread"]) -> None:
        self._ray = _connected(address)
        self._strategy = strategy.upper()
        self._needs: list[ResourceRequest] = []
        self._group: Any = None
        self._channels: dict[str, RayChannel] = {}
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
            if need.name not in self._channels:
                self._channels[need.name] = self._new_place(number, need)
            self._about[need.name] = self._channels[need.name].actor.about.remote()
        self._hosts.clear()

    def is_placed(self) -> bool:
        ready, waiting = self._ray.wait(list(self._about.values()), num_returns=len(self._about), timeout=0)
        for number, need in enumerate(self._needs):
            if need.name in self._hosts or self._about[need.name] not in ready:
                continue
            try:
                about = self._ray.get(self._about[need.name])
            except self._ray.exceptions.RayActorError as error:
                _check_imports(error)
                self._channels[need.name] = self._new_place(number, need)
                self._about[need.name] = self._channels[need.name].actor.about.remote()
                waiting.append(self._about[need.name])
                continue
            _check_version(about)
            address = about["address"]
            self._hosts[need.name] = RemoteHost(f"{about['name']} ({address})", address, self._channels[need.name])
        return not waiting

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
        if asked := [call for channel in self._channels.values() for call in channel.asked]:
            # Before the actors go: `kill` ends a whole group, the kernel only our processes of it.
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_TIMEOUT_S)
        for channel in self._channels.values():
            self._ray.kill(channel.actor)
        if self._group is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                importlib.import_module("ray.util.placement_group").remove_placement_group(self._group)
        self._ray.shutdown()

    def _new_place(self, number: int, need: ResourceRequest) -> RayChannel:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        strategy = scheduling.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        make: Any = self._ray.remote(_RayPlace).options(
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_restarts=0,
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=strategy,
        )
        return RayChannel(self._ray, make.remote())


class _RayPlace(RemoteAgent):
    def behind(self, started: int, method: str, *arguments: Any) -> Any:
        """Call a method after `start` has started a process: an actor runs its calls in no order."""
        del started  # Ray has waited for it
        return getattr(self, method)(*arguments)

    def about(self) -> dict[str, str]:
        address = importlib.import_module("ray.util").get_node_ip_address()
        try:
            installed = version("holdfast")
        except PackageNotFoundError:  # only on its PYTHONPATH
            installed = "without an installation"
        return {"name": socket.gethostname(), "version": installed, "address": address}


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
