"""The nodes of a run as an outer launcher gives them: their number, the address where they meet, the rank of this node.

An outer launcher (`torchrun`, `srun`, a Kubernetes job) may start one command per node; the command forks its ranks
itself. The command reads these variables, all of one row or none:

torchrun         GROUP_RANK, GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE (1), MASTER_ADDR, MASTER_PORT
others           RANK, WORLD_SIZE (of nodes), MASTER_ADDR, MASTER_PORT, as PyTorchJobs set them
srun             SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS (the same), SLURM_STEP_NODELIST, SLURM_JOB_ID;
                 MASTER_ADDR and MASTER_PORT if they are set
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from holdfast.config.training import TrainingCommand, host_and_port
from holdfast.errors import ConfigError

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
    """Return `config` with the nodes of an outer launcher, if there is one, and the rank of this node among them. Raise
    ConfigError if the environment is incomplete or contradicts the settings, or several nodes have no address."""
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
    """Return what an outer launcher says, if this command was started by one. Raise ConfigError if it starts several
    processes on a node, or a variable of it is missing, not a number or too large."""
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
