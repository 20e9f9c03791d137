"""A run within an allocation of SLURM's: a step with an agent for every process, on the nodes of the allocation.

SLURM ends the job where a node is lost, and starts it again with others where it is asked to (`--requeue`).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess

from holdfast.errors import ConfigError
from holdfast.launcher.cluster.cluster import Need, assign, wanted_and_there
from holdfast.launcher.cluster.hosts import PipeWire, RemoteHost, agent_command, close_all
from holdfast.process.child import killed_by

_COMMAND_TIMEOUT_S = 60.0


class SlurmCluster:  # untested: needs SLURM (pytest -m slurm)
    """Places processes on the nodes of the allocation that this process runs in.

    Raises:
        ConfigError: it runs in none.
    """

    def __init__(self) -> None:
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        if nodes is None:
            raise ConfigError(
                "cluster = 'slurm' needs an allocation (SLURM_JOB_NODELIST is not set): `rl --slurm` submits a job, "
                "or start this in one of sbatch's or salloc's"
            )
        self._names = _run(["scontrol", "show", "hostnames", nodes]).split()
        self._addresses = {name: _address_of(name) for name in self._names}
        cpus = _per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
        gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
        self._nodes = [
            {"CPU": float(cpus[min(number, len(cpus) - 1)])} | ({"GPU": float(gpus)} if gpus else {})
            for number in range(len(self._names))
        ]
        self._needs: list[Need] = []
        self._assigned: list[int] = []
        self._wires: dict[str, PipeWire] = {}
        self._hosts: dict[str, RemoteHost] = {}

    @property
    def has_gpus(self) -> bool:
        """Whether the job was given GPUs."""
        return "GPU" in self._nodes[0]

    def check(self, needs: list[Need]) -> None:
        """Divide the nodes among the processes.

        Raises:
            ConfigError: they have too little.
        """
        assigned = assign(needs, self._nodes)
        if assigned is None:
            raise ConfigError(f"the SLURM allocation has too few resources.\n{wanted_and_there(needs, self._nodes)}")
        self._needs, self._assigned = needs, assigned

    def place(self) -> None:
        """Start an agent for every process that has none, or has lost it."""
        for need, node in zip(self._needs, self._assigned, strict=True):
            wire = self._wires.get(need.name)
            if wire is not None and not wire.is_lost:
                continue
            name = self._names[node]
            self._wires[need.name] = wire = PipeWire(step_command(name))
            self._hosts[need.name] = RemoteHost(name, self._addresses[name], wire)

    def is_placed(self) -> bool:
        """Whether every process has an agent; one that cannot be started shows in the first call to it."""
        return True

    def missing(self) -> str:
        """Say what has no place."""
        return "no place for any process"

    def devices(self, name: str) -> list[int]:
        """Return which GPUs of its node are those of a process."""
        number = next(number for number, need in enumerate(self._needs) if need.name == name)
        node = self._assigned[number]
        before = sum(need.gpus for need, on in zip(self._needs[:number], self._assigned, strict=False) if on == node)
        return list(range(before, before + self._needs[number].gpus))

    def host(self, name: str) -> RemoteHost:
        """Return where a process is placed."""
        return self._hosts[name]

    def close(self) -> None:
        """End the agents, with what they started."""
        close_all(self._wires.values())


def step_command(node: str) -> list[str]:  # untested: needs SLURM (pytest -m slurm)
    """Return the command line that starts an agent on `node`, beside whatever runs there."""
    step = ["srun", "--overlap", "--nodes", "1", "--ntasks", "1", "--nodelist", node]
    # Bound to nothing: every process takes the cores that its settings say.
    return [*step, "--cpu-bind", "none", "--mpi", "none", "--unbuffered", *agent_command()]


def _per_node(text: str) -> list[int]:  # untested: needs SLURM (pytest -m slurm)
    """Return 8, 8, 4 for `8(x2),4`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _address_of(node: str) -> str:  # untested: needs SLURM (pytest -m slurm)
    """Return the address that SLURM reaches a node at."""
    found = re.search(r"\bNodeAddr=(\S+)", _run(["scontrol", "show", "node", node, "--oneliner"]))
    name = found[1] if found else node
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the address of node {node}, '{name}', cannot be found: {error}") from None


def _run(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S).stdout
    except FileNotFoundError:
        raise ConfigError(f"cluster = 'slurm' needs SLURM's commands, and '{argv[0]}' is not there") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{' '.join(argv)}` has not answered within {_COMMAND_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        killed = killed_by(error.returncode)
        reason = error.stderr.strip() if killed is None else f"it was killed by {killed.name}"
        raise ConfigError(f"`{' '.join(argv)}` failed: {reason}") from None
