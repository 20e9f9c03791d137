"""Starting one training run on several nodes: what the command does on each of them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

from holdfast.commands.launcher.endpoints import Listeners, listening_for
from holdfast.commands.launcher.nodes import NodeGroup
from holdfast.commands.launcher.plan import Healing, Plan
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.storage_backoff import StorageBackoff
from holdfast.commands.launcher.watch import watch
from holdfast.commands.resume.attempt import Attempt, with_resume, write_config
from holdfast.commands.resume.plan import prepare
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.errors import HoldfastError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.import_path import module_command
from holdfast.trainer.nodes import ENDPOINT_ENV, NODE_RANK_ENV

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
        with listening_for(config) if group.leads else nullcontext(Listeners()) as listeners:
            code = _run(config, group, environment, listeners)
    except HoldfastError as error:
        code, said = error.exit_code, str(error)
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        code = group.leave(code, said)
    return code


def _run(config: TrainingCommand, group: NodeGroup, environment: dict[str, str], listeners: Listeners) -> int:
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
    return watch(plan_on_node(config, group, environment), healing, group, listeners)


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
