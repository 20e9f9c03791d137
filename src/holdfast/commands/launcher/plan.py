"""What `watch` is given: the processes of one attempt, and what keeps a run going whose processes die."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.commands.launcher.hosts.cluster import Cluster, is_trainer
from holdfast.commands.launcher.hosts.host import Host
from holdfast.commands.launcher.liveness import Health
from holdfast.commands.launcher.plan_table import PlannedProcess
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.storage_backoff import StorageBackoff
from holdfast.commands.resume.attempt import Attempt
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.files import durable

EVALUATION = "evaluation"
"""Name of the process that evaluates what a trainer saves."""


@dataclass(frozen=True)
class Plan:
    """One attempt, ready to start.

    Attributes:
        commands: argv of every process, by name, in the order of starting.
        trainer: configuration of the trainer.
        paths: the resolved configurations.
        health: what to ask for the health of a process, by name.
        environments: variables of a process, by name, such as those that give it its GPUs.
        processes: what a dry run shows.
        hosts: where a process runs, by name; this machine where it is not named.
        node: which of several nodes with this run this one is.
    """

    attempt: Attempt
    commands: dict[str, list[str]]
    trainer: TrainingCommand
    paths: list[Path]
    health: dict[str, Health] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    processes: list[PlannedProcess] = field(default_factory=list)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    node: int = 0

    def work_of(self, name: str) -> Callable[[], bool]:
        """Return what says whether a process that has ended by itself did its work: code of users may end it before."""
        run_dir, last = self.attempt.run_dir, self.trainer.max_steps
        if name == EVALUATION:
            return lambda: True  # it alone knows what there was to do
        if is_trainer(name):
            return lambda: durable.is_visible(run_dir.weights_of(last))
        return lambda: durable.is_visible(run_dir.batch(last)) or last in run_dir.committed_steps()

    def file_name(self, name: str) -> str:
        """Name of a file of this node: nodes write into one directory."""
        return f"{name}_node_{self.node}" if self.node else name


@dataclass(frozen=True)
class Healing:
    """What keeps a run going whose processes die.

    Attributes:
        again: makes the plan that goes on with the run after its trainer died.
        restarts: the allowance of restarts after crashes.
        storage_backoff: how long the run waits for its storage.
        heartbeat_timeout_s: a process that is silent for this long is killed.
        cluster: where the processes have their places, which may get lost; None: on this machine.
        cluster_timeout_s: how long other places are waited for.
    """

    again: Callable[[], Plan]
    restarts: Restarts
    storage_backoff: StorageBackoff
    heartbeat_timeout_s: float
    cluster: Cluster | None = None
    cluster_timeout_s: float = 0.0
