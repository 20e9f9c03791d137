"""Start one training program on all ranks: `python -m holdfast.trainer.launch {sft,dpo,reward-model,rl} resolved.toml`.

torchrun's launcher (torch.distributed.launcher) forks the ranks, so the imports, which take seconds, run once. If a
rank ends early, the launcher stops the other ranks, and exits with the code of the rank that failed first.

With `parallel.nodes` above 1, the launcher runs this command on every node with the same file. Environment:
    HOLDFAST_NODE_RANK       the rank of this node, from 0
    HOLDFAST_RDZV_ENDPOINT   HOST:PORT on node 0, where the ranks of this attempt meet

A request to stop goes to all nodes through the store of the rendezvous, also while no collective runs. The launcher
ends all nodes if one fails: their ranks may hang in a collective.
"""

import argparse
import importlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.config import PROGRAMS, TrainerConfig, program_config
from holdfast.config.load import read_toml
from holdfast.config.preference import DpoConfig
from holdfast.config.rl_trainer import CollectiveWeights
from holdfast.config.training import ParallelConfig, TrainingCommand, host_and_port
from holdfast.errors import HoldfastError, RankLost, is_storage_failure
from holdfast.process import child
from holdfast.process.events import EVENTS_ENV, report
from holdfast.process.gpus import VISIBLE_DEVICES_ENV
from holdfast.process.heartbeat import does, start_heartbeat
from holdfast.process.imports import protect_children
from holdfast.process.scratch import scratch_directory
from holdfast.run.inputs import ask_hub
from holdfast.run.run_dir import RunDir
from holdfast.trainer.stop import SIGNALS, STOP_REQUEST, StopRequest

NODE_RANK_ENV = "HOLDFAST_NODE_RANK"
ENDPOINT_ENV = "HOLDFAST_RDZV_ENDPOINT"

_LOOPBACK = "127.0.0.1"
_ONE_NODE = "holdfast_one_node"
_PERIOD_S = 0.2


class StopLink:
    """Passes requests to stop on to the other nodes while the ranks run, also while no collective does. `connect`:
    opens the store of the rendezvous, which node 0 hosts; may wait."""

    def __init__(self, connect: Callable[[], Any], stop: StopRequest) -> None:
        self._connect, self._stop = connect, stop
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="nodes", daemon=True).start()

    def end(self) -> None:
        """Pass nothing on any more: the ranks of this node have ended."""
        self._ended.set()

    def _run(self) -> None:
        with suppress(RuntimeError):  # torch's: node 0 is gone, which the launcher notices
            store = self._connect()
            while not self._ended.wait(_PERIOD_S):
                if number := self._stop.signal_number():
                    store.set("holdfast/stop", str(number))
                elif store.check(["holdfast/stop"]):
                    self._stop.ask(int(store.get("holdfast/stop")))


_DEAD_RANK_S = 3.0
_POLL_S = 0.02


def _module_of(program: str) -> ModuleType:
    return importlib.import_module(f"holdfast.trainer.programs.{program.replace('-', '_')}")


def _worker(program: str, config_path: str, parent: int) -> None:
    """Run one rank, in a forked child of process `parent`, which may have died by now."""
    child.die_with_parent(parent=parent)
    # Ctrl-C reaches the whole process group; `parent` stops the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.set_up_logging("trainer")
    if os.environ["LOCAL_RANK"] != "0":
        os.environ.pop(EVENTS_ENV, None)  # the first rank of a node shows the phases of all
    heartbeat = start_heartbeat(f"_rank_{os.environ['RANK']}")
    config = read_toml(program_config(program), config_path)
    if config.ckpt is not None:
        STOP_REQUEST.listen()
    if isinstance(config, TrainerConfig):
        does("its start", bound_s=config.startup_timeout_s)
    module = _module_of(program)
    if config.parallel.device == "cuda":
        importlib.import_module("holdfast.trainer.mesh").set_numerics(deterministic=config.deterministic)
    try:
        child.run_reporting_errors(lambda: _run_rank(module, config))
    finally:
        heartbeat.end()


def _run_rank(module: ModuleType, config: Any) -> None:
    """Run the program. If it fails because another rank died, wait until the launcher has noticed that rank.

    The launcher of the ranks reports the end that it sees first, and sends SIGTERM to the other ranks."""
    try:
        module.run(config)
    except Exception as error:
        is_explained = isinstance(error, HoldfastError) and not isinstance(error, RankLost)
        if config.parallel.world_size > 1 and not is_explained and not is_storage_failure(error):
            deadline = time.monotonic() + _DEAD_RANK_S
            while not STOP_REQUEST.signal_number() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        raise


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Hide GPUs from `LaunchConfig`, which may count them by CUDA; forked ranks could not use CUDA then."""
    visible = os.environ.get(VISIBLE_DEVICES_ENV)
    os.environ[VISIBLE_DEVICES_ENV] = ""
    try:
        yield
    finally:
        del os.environ[VISIBLE_DEVICES_ENV]
        if visible is not None:
            os.environ[VISIBLE_DEVICES_ENV] = visible


def _stay_on_this_machine(config: TrainingCommand) -> None:
    """Have the ranks of one node meet where no other machine reaches them, and gloo talk there.

    The stores of torch's own backends listen at every address, and gloo at the address of the host's name. NCCL, and
    gloo with `weights.transport = "collective"`, stay as they are. Once in a process."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OnLoopback(StaticTCPRendezvous):
        def __init__(self, parameters: RendezvousParameters) -> None:
            with socket.create_server((_LOOPBACK, 0)) as listener:  # the kernel picks a free port
                port, timeout_s = listener.getsockname()[1], math.ceil(config.parallel.rdzv_timeout_s)
                super().__init__(_LOOPBACK, port, 0, 1, parameters.run_id, timeout_s)
                # The store owns, and closes, the descriptor.
                self._store = TCPStore(
                    _LOOPBACK,
                    port,
                    1,
                    True,
                    self.timeout,
                    multi_tenant=True,
                    master_listen_fd=os.dup(listener.fileno()),
                )

        def get_backend(self) -> str:
            return _ONE_NODE

    rendezvous_handler_registry.register(_ONE_NODE, OnLoopback)
    if not (isinstance(config, TrainerConfig) and isinstance(config.weights, CollectiveWeights)):
        # No engine elsewhere gets weights from this trainer.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _rendezvous(parallel: ParallelConfig, node: int) -> dict[str, Any]:
    """Return settings of the rendezvous for torchrun's `LaunchConfig`."""
    if parallel.nodes == 1:
        return {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": _ONE_NODE, "rdzv_endpoint": _LOOPBACK}
    host, port = host_and_port(os.environ[ENDPOINT_ENV])
    return {
        "min_nodes": parallel.nodes,
        "max_nodes": parallel.nodes,
        # Static: node 0, which writes, is always the same.
        "rdzv_backend": "static",
        "rdzv_endpoint": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "rdzv_configs": {"rank": node, "timeout": math.ceil(parallel.rdzv_timeout_s)},
    }


@contextmanager
def _linked(config: TrainingCommand) -> Iterator[None]:
    """Pass requests to stop on to the other nodes within the block, if there are any and the run saves."""
    parallel = config.parallel
    if parallel.nodes == 1 or config.ckpt is None:
        yield
        return

    def connect() -> Any:
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=parallel.rdzv_timeout_s)
        return TCPStore(
            *host_and_port(os.environ[ENDPOINT_ENV]), is_master=False, wait_for_workers=False, timeout=timeout
        )

    link = StopLink(connect, STOP_REQUEST)
    try:
        yield
    finally:
        link.end()


def _ask_hub(config: TrainingCommand) -> None:
    """Ask the hub for models that are not directories: mistakes show before torch is imported."""
    ask_hub(config.model.name, key="model.name")
    if config.model.tokenizer:
        ask_hub(config.model.tokenizer, key="model.tokenizer", file="tokenizer.json")
    if isinstance(config, DpoConfig) and config.reference_model:
        ask_hub(config.reference_model, key="loss.reference_model")


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.trainer.launch")
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("config")
    arguments = parser.parse_args(argv)
    child.die_with_launcher()
    protect_children()
    child.set_up_logging("trainer")
    start_heartbeat()
    config = read_toml(program_config(arguments.program), arguments.config)
    child.keep_date(RunDir(config.output_dir).created_unix_s())
    parallel = config.parallel
    node, ranks = int(os.environ.get(NODE_RANK_ENV, "0")), parallel.ranks
    # Before torch is imported.
    child.set_thread_environment(parallel.threads or max(1, child.available_cores() // ranks))
    if config.ckpt is not None:
        # Before the ranks start there is nothing to save.
        for number in SIGNALS:
            signal.signal(number, lambda received, _: os._exit(128 + received))
    if parallel.device == "cuda" and config.deterministic:
        # cuBLAS reads it when CUDA starts; else its sums depend on free buffers.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Ranks are forked from this process, so it must not touch CUDA, not even to ask for it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    _ask_hub(config)
    report("importing torch")
    with child.heavy_imports():
        _module_of(arguments.program)
        importlib.import_module("torch.distributed.launcher.api")

    if config.ckpt is not None:
        STOP_REQUEST.listen()
    for noisy in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    with scratch_directory() as logs:
        return _launch(arguments, config, node, logs)


def _launch(arguments: argparse.Namespace, config: TrainingCommand, node: int, logs: Path) -> int:
    """Start the ranks of this node and wait for them; `logs` is torchrun's log directory."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    parallel = config.parallel
    if parallel.nodes == 1:
        _stay_on_this_machine(config)
    with _without_gpus():
        launch_config = LaunchConfig(
            nproc_per_node=parallel.ranks,
            **_rendezvous(parallel, node),
            run_id="holdfast",
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
            max_restarts=0,  # our launcher restarts from a checkpoint
            start_method="fork",
            monitor_interval=0.05,
            # With checkpoints on, SIGTERM asks the ranks for a last save instead of stopping them.
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT" + (",SIGTERM" if config.ckpt is None else ""),
        )
    try:
        with _linked(config):
            elastic_launch(launch_config, _worker)(arguments.program, arguments.config, os.getpid())
    except ChildFailedError as error:
        # A killed rank makes the others fail in their collectives: name the killed rank.
        rank, first = min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
        if first.exitcode < 0:
            print(f"error: rank {rank} was killed by signal {-first.exitcode}", file=sys.stderr, flush=True)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(child.exit_code_of(main))
