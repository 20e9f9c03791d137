"""Start one training program on all ranks: `python -m holdfast.trainer.launch {sft,dpo,reward-model,rl} resolved.toml`.

Uses torchrun's launcher (torch.distributed.launcher) with forked workers: the imports, which take
seconds, are paid once however many ranks there are. When a rank ends early the others are stopped,
and the exit code is that of the rank that failed first.

With `parallel.nodes` above 1 this is started on every node, with the same file. Environment:
    HOLDFAST_NODE_RANK       which of the nodes this one is, from 0; node 0 is the host of `parallel.rdzv_endpoint`
    HOLDFAST_RDZV_ENDPOINT   HOST:PORT to meet at instead
Where another node is lost, it ends with exit code 1.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.shared.config import PROGRAMS, TrainerConfig
from holdfast.shared.config.load import read_toml
from holdfast.shared.config.trainer import ParallelConfig, TrainingCommand
from holdfast.shared.errors import HoldfastError, RankLost, is_storage_failure
from holdfast.shared.process.child import (
    available_cores,
    die_with_launcher,
    die_with_parent,
    exit_code_of,
    heavy_imports,
    run_reporting_errors,
    set_thread_environment,
    set_up_logging,
)
from holdfast.shared.process.events import report
from holdfast.shared.process.gpus import VISIBLE_DEVICES_ENV
from holdfast.shared.process.heartbeat import does, start_heartbeat
from holdfast.shared.process.import_path import protect_children
from holdfast.shared.process.scratch import scratch_directory
from holdfast.trainer.nodes import link_nodes, meeting_point, node_rank
from holdfast.trainer.session.stop import SIGNALS, STOP_REQUEST

_DEAD_RANK_S = 3.0
_POLL_S = 0.02


def _module_of(program: str) -> ModuleType:
    return importlib.import_module(f"holdfast.trainer.programs.{program.replace('-', '_')}")


def _worker(program: str, config_path: str, parent: int) -> None:
    """One rank: runs in a forked child of process `parent`, which may have died by now."""
    die_with_parent(parent=parent)
    # Ctrl-C reaches the whole group; the process that started the ranks stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging("trainer")
    heartbeat = start_heartbeat(f"_rank_{os.environ['RANK']}")
    config = read_toml(PROGRAMS[program], config_path)
    if config.ckpt is not None:
        STOP_REQUEST.listen()
    if isinstance(config, TrainerConfig):
        does("its start", bound_s=config.startup_timeout_s)
    module = _module_of(program)
    if config.parallel.device == "cuda":
        # Here, where torch is imported: it reads its environment once.
        importlib.import_module("holdfast.trainer.cuda").set_numerics(deterministic=config.deterministic)
    try:
        run_reporting_errors(lambda: _run_rank(module, config))
    finally:
        heartbeat.end()  # the launcher of the ranks takes its time to end


def _run_rank(module: ModuleType, config: Any) -> None:
    """Run the program; where it fails because another rank died, let that one be the first to be noticed.

    The launcher of the ranks reports whichever end it sees first, and asks the others to stop by SIGTERM.
    """
    try:
        module.run(config)
    except Exception as error:
        is_explained = isinstance(error, HoldfastError) and not isinstance(error, RankLost)
        if config.parallel.world_size > 1 and not is_explained and not is_storage_failure(error):
            deadline = time.monotonic() + _DEAD_RANK_S
            # Ends by the signal that asks the others to stop, once the dead one was noticed.
            while not STOP_REQUEST.signal_number() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        raise


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Let torch see no GPU within the block.

    `LaunchConfig` asks how many there are. Where NVML cannot say (MIG, containers without it), torch asks CUDA itself,
    which the ranks could then never use.
    """
    visible = os.environ.get(VISIBLE_DEVICES_ENV)
    os.environ[VISIBLE_DEVICES_ENV] = ""
    try:
        yield
    finally:
        del os.environ[VISIBLE_DEVICES_ENV]
        if visible is not None:
            os.environ[VISIBLE_DEVICES_ENV] = visible


def _rendezvous(parallel: ParallelConfig, node: int) -> dict[str, Any]:
    """Return how the launchers of the ranks meet, as settings of torchrun's `LaunchConfig`."""
    if parallel.nodes == 1:
        # Port 0: the kernel picks a free one.
        return {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    host, port = meeting_point(parallel)
    return {
        "min_nodes": parallel.nodes,
        "max_nodes": parallel.nodes,
        # With numbers given to the nodes, not found by themselves: node 0, which writes, is always the same.
        "rdzv_backend": "static",
        "rdzv_endpoint": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "rdzv_configs": {"rank": node, "timeout": math.ceil(parallel.rdzv_timeout_s)},
    }


@contextmanager
def _linked(parallel: ParallelConfig, node: int) -> Iterator[None]:
    """Stay in touch with the other nodes within the block, if there are any."""
    if parallel.nodes == 1:
        yield
        return
    link = link_nodes(
        meeting_point(parallel),
        rank=node,
        nodes=parallel.nodes,
        timeout_s=parallel.rdzv_timeout_s,
        stop=STOP_REQUEST,
    )
    try:
        yield
    finally:
        link.end()


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.trainer.launch")
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("config")
    arguments = parser.parse_args(argv)
    die_with_launcher()
    protect_children()
    set_up_logging("trainer")
    start_heartbeat()
    config = read_toml(PROGRAMS[arguments.program], arguments.config)
    parallel = config.parallel
    node, ranks = node_rank(parallel), parallel.ranks
    # Before torch is imported, which reads it once.
    set_thread_environment(parallel.threads or max(1, available_cores() // ranks))
    if config.ckpt is not None:
        # Until there are ranks there is nothing to save: no one need wait for the imports.
        for number in SIGNALS:
            signal.signal(number, lambda received, _: os._exit(128 + received))
    if parallel.device == "cuda" and config.deterministic:
        # cuBLAS reads it when CUDA starts: without, its sums depend on which buffers happen to be free.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Ranks are forked from this process: nothing in it may begin to use CUDA, not even by asking whether there is one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    report("importing torch")
    with heavy_imports():
        _module_of(arguments.program)
        importlib.import_module("torch.distributed.launcher.api")

    if config.ckpt is not None:
        STOP_REQUEST.listen()
    for noisy in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    with scratch_directory() as logs:  # torchrun's own would stay for good
        return _launch(arguments, config, node, logs)


def _launch(arguments: argparse.Namespace, config: TrainingCommand, node: int, logs: Path) -> int:
    """Start the ranks of this node and wait for them; `logs` is for what torchrun writes of them."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    parallel = config.parallel
    with _without_gpus():
        launch_config = LaunchConfig(
            nproc_per_node=parallel.ranks,
            **_rendezvous(parallel, node),
            run_id="holdfast",
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
            max_restarts=0,  # our launcher starts again, from a checkpoint and with its own count
            start_method="fork",
            monitor_interval=0.05,
            # With checkpoints on, SIGTERM asks the ranks for a last save instead of stopping them.
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT" + (",SIGTERM" if config.ckpt is None else ""),
        )
    try:
        with _linked(parallel, node):
            elastic_launch(launch_config, _worker)(arguments.program, arguments.config, os.getpid())
    except ChildFailedError as error:
        # A rank that was killed makes the others fail in their collectives: it is the reason, not they.
        rank, first = min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
        if first.exitcode < 0:
            print(f"error: rank {rank} was killed by signal {-first.exitcode}", file=sys.stderr, flush=True)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
