"""The processes of one attempt: as `watch` starts them, and as `--dry-run` prints them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.config.inference import InferenceConfig
from holdfast.config.training import TrainingCommand
from holdfast.launcher.cluster.cluster import is_trainer
from holdfast.launcher.cluster.hosts import Host
from holdfast.launcher.devices import Placement, names_of
from holdfast.launcher.liveness import Health
from holdfast.launcher.resume.attempt import Attempt
from holdfast.process.child import available_cores
from holdfast.process.gpus import Gpu
from holdfast.run import atomic
from holdfast.view.tables import Grid, print_parts

EVALUATION = "evaluation"
"""Name of the process that evaluates what a trainer saves."""


@dataclass(frozen=True)
class Plan:
    """One attempt, ready to start.

    Attributes:
        commands: argv of every process, by name, in the order of starting.
        trainer: configuration of the trainer.
        paths: the resolved configurations.
        health, environments, hosts: by name of the process; a process without a host runs on this machine.
        processes: for a dry run.
        asked_to_stop: returns the signal that another host got for the run, if any.
    """

    attempt: Attempt
    commands: dict[str, list[str]]
    trainer: TrainingCommand
    paths: list[Path]
    health: dict[str, Health] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    processes: list[PlannedProcess] = field(default_factory=list)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    asked_to_stop: Callable[[], int | None] = lambda: None

    def work_of(self, name: str) -> Callable[[], bool]:
        """Return a function that tells whether a process that ended by itself did its work."""
        run_dir, last, saves = self.attempt.run_dir, self.trainer.max_steps, self.trainer.ckpt is not None
        if name == EVALUATION:
            return lambda: True
        if is_trainer(name):
            return lambda: atomic.is_visible(run_dir.weights_of(run_dir.early_end() or last))
        return lambda: (
            atomic.is_visible(run_dir.batch(last))
            or last in run_dir.committed_steps()
            or run_dir.has_ended_early(saves=saves)
        )


_COLUMNS = ("process", "host", "devices", ">ranks", ">threads", ">port", "dtype")


@dataclass(frozen=True)
class PlannedProcess:
    """A row of the table: one process of a run, or several alike on other machines.

    Attributes:
        devices: `CPU`, or its GPUs by name; and whether parameters are offloaded.
        threads: of each rank, or of the process; 0: what its libraries take.
        dtype: of the model; empty: the process has none.
        host: empty: this machine.
    """

    name: str
    devices: str = "CPU"
    ranks: int = 0
    threads: int = 0
    port: int = 0
    dtype: str = ""
    host: str = ""


def planned_trainer(
    config: TrainingCommand, placement: Placement, *, cluster: str | None = None
) -> list[PlannedProcess]:
    """Return the rows of a training program; a `cluster` chooses the nodes, else only the head node has a name."""
    parallel, nodes = config.parallel, config.parallel.nodes
    devices = _shown(placement.trainer, is_counted=cluster is not None)
    one = PlannedProcess(
        "trainer",
        f"{devices}, CPU offload" if parallel.cpu_offload else devices,
        ranks=parallel.ranks,
        threads=parallel.threads or (0 if cluster or nodes > 1 else max(1, available_cores() // parallel.ranks)),
        dtype=config.model.compute_dtype,
        host=of_cluster(cluster),
    )
    if nodes == 1:
        return [one]
    if cluster is not None:
        return [replace(one, name=f"trainer ({nodes} nodes)")]
    others = "node 1" if nodes == 2 else f"nodes 1-{nodes - 1}"
    leads = replace(one, name="trainer (node 0)", host=parallel.rendezvous[0])
    return [leads, replace(one, name=f"trainer ({others})", host="others")]


def planned_engine(
    name: str, config: InferenceConfig, gpus: Sequence[Gpu], *, cluster: str | None = None
) -> PlannedProcess:
    """Return the row of the inference server `name`."""
    return PlannedProcess(
        name,
        _shown(gpus, is_counted=cluster is not None),
        threads=config.engine.threads or 0,
        port=0 if cluster else config.server.port,  # chosen on its host
        dtype=config.model.dtype or "",
        host=of_cluster(cluster),
    )


def of_cluster(cluster: str | None) -> str:
    """Return what the table shows as the host of a process that `cluster` places."""
    return "" if cluster is None else f"by {cluster}"


def print_table(processes: Sequence[PlannedProcess]) -> None:
    """Print one line for each process."""
    here = socket.gethostname()
    rows = [
        (
            one.name,
            one.host or here,
            one.devices,
            *(str(number or "-") for number in (one.ranks, one.threads, one.port)),
            one.dtype,
        )
        for one in processes
    ]
    print_parts([Grid(_COLUMNS, rows)])


def _shown(gpus: Sequence[Gpu], *, is_counted: bool) -> str:
    """Return the names of GPUs, or their number if they are of another machine."""
    if not gpus:
        return "CPU"
    return f"{len(gpus)} x GPU" if is_counted else f"GPU {names_of(gpus)}"
