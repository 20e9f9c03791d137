"""Starts one training run on several nodes: what the command does on each node.

An outer launcher (`torchrun`, `srun`, a Kubernetes job) may start one command per node; the command forks its ranks
itself. The command reads these variables, all of one row or none:

torchrun         GROUP_RANK, GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE (1), MASTER_ADDR, MASTER_PORT
others           RANK, WORLD_SIZE (of nodes), MASTER_ADDR, MASTER_PORT, as PyTorchJobs set them
srun             SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS (the same), SLURM_STEP_NODELIST, SLURM_JOB_ID;
                 MASTER_ADDR and MASTER_PORT if they are set
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import TrainingCommand
from holdfast.errors import ConfigError, HoldfastError
from holdfast.launcher.heal import watch
from holdfast.launcher.plan import Healing, Plan, Restarts, StorageBackoff
from holdfast.launcher.rendezvous import NodeGroup
from holdfast.launcher.resume.attempt import Attempt, with_resume, write_config
from holdfast.launcher.resume.plan import prepare
from holdfast.process.imports import module_command
from holdfast.run.run_dir import RunDir
from holdfast.trainer.launch import ENDPOINT_ENV, NODE_RANK_ENV

RESTART_WINDOW_S = 600.0
HEARTBEAT_TIMEOUT_S = 120.0
_MOMENT_S = 0.1


def launch_on_nodes(config: TrainingCommand, *, rank: int | None, environment: dict[str, str]) -> int:
    """Run a training program on this node and the others; return the exit code.

    Args:
        rank: of this node, where an outer launcher says so; unset: who has the address to meet at leads.
        environment: variables of the trainer, such as those that give it its GPUs.
    """
    group = NodeGroup(config, process_name(config), rank=rank)
    code, said = 1, ""
    try:
        if group.leads:
            # Before the others come: another run in this directory is told at once.
            RunDir(config.output_dir).lock()
        code = _run(config, group, environment)
    except HoldfastError as error:
        code, said = error.exit_code, str(error)
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        code = group.leave(code, said)
    return code


def _run(config: TrainingCommand, group: NodeGroup, environment: dict[str, str]) -> int:
    number = group.gather(lambda: time.sleep(_MOMENT_S), lambda text: print(text, flush=True))
    if number is not None:
        return 128 + number
    healing = None
    if config.ckpt is not None:
        healing = Healing(
            again=lambda: plan_on_node(config, group, environment, again=True),
            restarts=Restarts(config.parallel.max_restarts, RESTART_WINDOW_S),
            storage_backoff=StorageBackoff(0.0),
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        )
    return watch(plan_on_node(config, group, environment), healing, group)


def plan_on_node(
    config: TrainingCommand, group: NodeGroup, environment: dict[str, str], *, again: bool = False
) -> Plan:
    """Return this node's part of the attempt that begins; the node that leads prepares it."""
    run_dir = RunDir(config.output_dir)
    if group.leads:
        # The command that led may have been started again while the others wait for it: the run goes on then.
        again = again or group.is_rejoined()
        clean = config.clean and not again
        attempt = prepare(config, clean=clean, dry_run=False, again=again, is_locked=True)
        resumed = with_resume(config, attempt.resume_step)
        path = write_config(attempt, process_name(config), resumed, dry_run=False)
        part = group.begin(attempt)
    else:
        part = group.join()
        attempt = Attempt(run_dir, part.attempt, part.resume_step)
        resumed = with_resume(config, attempt.resume_step)
        path = run_dir.configs(part.attempt) / f"{process_name(config)}.toml"
        print(f"node {part.rank} of {config.parallel.nodes}: {attempt.start} (attempt {attempt.number})", flush=True)
    environment = {**environment, NODE_RANK_ENV: str(part.rank), ENDPOINT_ENV: part.endpoint}
    commands = {"trainer": trainer_command(config, path)}
    return Plan(attempt, commands, resumed, [path], environments={"trainer": environment}, node=part.rank)


def process_name(config: TrainingCommand) -> str:
    """Return the name of the file with the resolved settings of a training program."""
    return "trainer" if isinstance(config, TrainerConfig) else config.program


def trainer_command(config: TrainingCommand, path: Path) -> list[str]:
    """Return the command line of the process that starts the ranks, which reads `config` from `path`."""
    return module_command("holdfast.trainer.launch", config.program, str(path))


T = TypeVar("T", bound=TrainingCommand)
_TORCHRUN = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLAIN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_FIRST_PORT, _PORTS = 29400, 1000
_HOSTS = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<first>\d+)[^\]]*\])?(?P<suffix>[^,]*)")


@dataclass(frozen=True)
class Outer:
    """The nodes of an outer launcher.

    Attributes:
        name: of the launcher.
        endpoint: HOST:PORT of its first node.
        rank: of this node.
    """

    name: str
    nodes: int
    endpoint: str
    rank: int


def with_outer_nodes(config: T, environment: Mapping[str, str]) -> tuple[T, int | None]:
    """Return `config` with the nodes of an outer launcher, if there is one, and the rank of this node among them.

    Raises:
        ConfigError: what the environment says is not whole, or contradicts the settings; or several nodes have no
            place to meet.
    """
    outer, parallel = outer_nodes(environment), config.parallel
    if outer is not None and outer.nodes > 1:
        if "nodes" in parallel.model_fields_set and parallel.nodes != outer.nodes:
            raise ConfigError(
                f"parallel.nodes = {parallel.nodes}, and {outer.name} starts this command on {outer.nodes} nodes: "
                "leave the setting out, or give that number."
            )
        update = {"nodes": outer.nodes, "rdzv_endpoint": parallel.rdzv_endpoint or outer.endpoint}
        # An address that was given decides by itself who leads.
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


def outer_nodes(environment: Mapping[str, str]) -> Outer | None:
    """Return what an outer launcher says, if this command was started by one.

    Raises:
        ConfigError: it starts several processes on a node, or a variable of it is missing or no number.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        rank, nodes, per_node = _numbers("torchrun", _TORCHRUN, environment)
        if per_node != 1:
            raise ConfigError(
                f"torchrun starts {per_node} processes on every node, and this command starts its ranks itself: give "
                f"torchrun --nproc-per-node 1, and the command --parallel.num-ranks {per_node}."
            )
        # The port beside it: at MASTER_PORT torchrun itself listens.
        return Outer("torchrun", nodes, f"{environment['MASTER_ADDR']}:{_port(environment) + 1}", rank)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        rank, nodes = _numbers("the outer launcher", _PLAIN, environment)
        if environment.get("LOCAL_WORLD_SIZE", "1") != "1" or environment.get("LOCAL_RANK", "0") != "0":
            raise ConfigError(
                "the outer launcher starts several processes on a node (LOCAL_RANK, LOCAL_WORLD_SIZE), and this "
                "command starts its ranks itself: start one on every node, with --parallel.num-ranks."
            )
        return Outer("the outer launcher", nodes, f"{environment['MASTER_ADDR']}:{_port(environment)}", rank)
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return None
    rank, nodes, tasks = _numbers("srun", _SLURM, environment)
    if tasks != nodes:
        raise ConfigError(
            f"srun starts {tasks} tasks on {nodes} nodes, and this command starts its ranks itself: give srun "
            "--ntasks-per-node 1, and the command --parallel.num-ranks."
        )
    host = environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"])
    # Jobs that share a node meet at different ports.
    port = _FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % _PORTS
    return Outer("srun", nodes, f"{host}:{_port(environment) if 'MASTER_PORT' in environment else port}", rank)


def _numbers(launcher: str, names: tuple[str, ...], environment: Mapping[str, str]) -> list[int]:
    """Return the values of all of `names` but the last two or one, which are no numbers.

    Raises:
        ConfigError: one is missing, or is no number.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{launcher} has started this command, by its environment, but {', '.join(missing)} is not set: set all "
            f"of {', '.join(names)}, or none."
        )
    numbers = [name for name in names if name not in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST")]
    for name in numbers:
        if not environment[name].isdecimal():
            raise ConfigError(f"{name} of {launcher} should be a number, got '{environment[name]}'")
    return [int(environment[name]) for name in numbers]


def _port(environment: Mapping[str, str]) -> int:
    port = environment["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(f"MASTER_PORT should be the number of a port, got '{port}'")
    return int(port)


def _first_host(nodes: str) -> str:
    """Return the first of a list of hosts as SLURM writes it, such as `gpu[003-004,7],head`."""
    match = _HOSTS.match(nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST should be a list of hosts, got '{nodes}'")
    return f"{match['prefix']}{match['first'] or ''}{match['suffix']}"
