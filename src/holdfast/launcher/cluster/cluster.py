"""The launcher's interface to a cluster: a place for every process of the run, on nodes that may get lost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.config.rl import RlConfig
from holdfast.errors import ConfigError
from holdfast.launcher.cluster.hosts import RemoteHost
from holdfast.launcher.devices import gpus_per_engine
from holdfast.process.heartbeat import awake_s
from holdfast.run import atomic

_PERIOD_S = 0.5
_TELL_AFTER_S = 10.0
_VISIBLE_S = 35.0


@dataclass(frozen=True)
class ResourceRequest:
    """The cores and GPUs that one process of the run needs on its node."""

    name: str
    cpus: int
    gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """By Ray's names."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


class Places(Protocol):
    """Nodes, and the processes of the run that are placed on them."""

    def place(self) -> None:
        """Begin to find a place for every process without one."""
        ...

    def is_placed(self) -> bool:
        """Whether every process has a place now; raise `ConfigError` if a node cannot run its process."""
        ...

    def missing(self) -> str:
        """Name the processes that find no free host, and the hosts."""
        ...

    def host(self, name: str) -> RemoteHost:
        """Return the host of a process that is placed."""
        ...

    def close(self) -> None:
        """End all processes on other hosts, and give the places back."""
        ...


class Cluster(Places, Protocol):
    """A cluster that has places for all processes of a run."""

    def devices(self, name: str) -> list[int]:
        """Return which GPUs of its node a process gets; empty if the cluster assigns them itself."""
        ...

    def check(self, needs: list[ResourceRequest]) -> None:
        """Note what the processes need; raise `ConfigError` if empty nodes do not have it."""
        ...

    @property
    def has_gpus(self) -> bool:
        """Whether any node has GPUs."""
        ...


def wait_for_places(
    cluster: Places, *, timeout_s: float, pause: Callable[[float], int | None], say: Callable[[str], object]
) -> int | None:
    """Find a place for every process without one; return None, or the number of a signal that ended the wait.

    Args:
        pause: waits for so many seconds; returns the number of a signal that came.
        say: gets a line if it takes long.

    Raise TimeoutError that names the processes without a place after `timeout_s`; ConfigError if a node cannot run its
    process.
    """
    cluster.place()
    begin, is_told = awake_s(), False
    while not cluster.is_placed():
        waited_s = awake_s() - begin
        if waited_s > timeout_s:
            raise TimeoutError(cluster.missing())
        if waited_s > _TELL_AFTER_S and not is_told:
            is_told = True
            say(f"waiting for the cluster: {cluster.missing()}")
        if (number := pause(_PERIOD_S)) is not None:
            return number
    return None


def is_trainer(name: str) -> bool:
    """Whether a process with this name belongs to the trainer."""
    return name.split("_")[0] == "trainer"


def trainer_names(nodes: int) -> list[str]:
    """Return the names of the processes that start the ranks, one per node."""
    return ["trainer", *(f"trainer_{node}" for node in range(1, nodes))]


def requests_of(config: RlConfig, *, on_gpus: bool, starts_inference: bool) -> list[ResourceRequest]:
    """Return what every process of a run needs; `on_gpus`: the nodes have GPUs, and the run takes them."""
    parallel, engine = config.trainer.parallel, config.inference.engine
    ranks, shards = parallel.ranks, gpus_per_engine(config.inference)
    needs = [
        ResourceRequest(name, ranks * (1 if on_gpus else parallel.threads or 1), ranks if on_gpus else 0)
        for name in trainer_names(parallel.nodes)
    ]
    if starts_inference:
        cpus, gpus = (shards, shards) if on_gpus else (engine.threads or 1, 0)
        needs += [ResourceRequest(name, cpus, gpus) for name in config.inference.of_each()]
    return [*needs, ResourceRequest("orchestrator", 1)]


def assign(needs: list[ResourceRequest], nodes: list[dict[str, float]]) -> list[int] | None:
    """Return the node of every process, the largest first: on the emptiest node or, if they do not fit so, on the
    fullest that has room. None: neither fits."""
    return _assigned(needs, nodes, max) or _assigned(needs, nodes, min)


def _assigned(
    needs: list[ResourceRequest], nodes: list[dict[str, float]], choose: Callable[..., int]
) -> list[int] | None:
    left = [dict(node) for node in nodes]
    chosen = [0] * len(needs)
    for number in sorted(range(len(needs)), key=lambda number: (-needs[number].gpus, -needs[number].cpus)):
        wanted = needs[number].resources
        able = [on for on, node in enumerate(left) if all(node.get(kind, 0) >= wanted[kind] for kind in wanted)]
        if not able:
            return None
        chosen[number] = choose(able, key=lambda on: (left[on].get("GPU", 0), left[on].get("CPU", 0)))
        for kind in wanted:
            left[chosen[number]][kind] -= wanted[kind]
    return chosen


def wanted_and_there(needs: list[ResourceRequest], nodes: list[dict[str, float]]) -> str:
    """Return two lines: what is wanted, and what nodes have."""
    wanted = "; ".join(f"{need.name}: {_shown(need.resources)}" for need in needs)
    there = "; ".join(_shown(node) for node in nodes) or "no node"
    return f"       wanted, each on one node: {wanted}\n       there, node by node: {there}"


def _shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind)) or "nothing"


def check_shared(cluster: Places, names: list[str], run_dir: Path, *, files: Sequence[Path] = ()) -> None:
    """Wait until every host sees the directory of the run, and new `files` in it; raise `ConfigError` if one does not.

    Network filesystems may show a new file half a minute late."""
    run_dir = run_dir.absolute()
    marker = run_dir / f"{atomic.TEMPORARY_PREFIX}shared"
    marker.touch()
    try:
        for name in names:
            host, deadline = cluster.host(name), awake_s() + _VISIBLE_S
            while missing := host.ask("missing", [str(marker), *map(str, files)]):
                if awake_s() > deadline:
                    raise ConfigError(
                        f"{host.name}, where {name} runs, does not see {missing[0]}: give an --output-dir on a "
                        "filesystem that all hosts share"
                    )
                time.sleep(_PERIOD_S)
    finally:
        marker.unlink()
