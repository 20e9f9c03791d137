"""Start one training program on all ranks: `python -m holdfast.trainer.launch {sft,dpo,reward-model,rl} resolved.toml`.

It uses torchrun's launcher (torch.distributed.launcher) with forked workers. So the imports, which take seconds, run
once for any number of ranks. If a rank ends early, the launcher stops the other ranks, and exits with the code of the
rank that failed first.

With `parallel.nodes` above 1, every node runs this command with the same file. Environment:
    HOLDFAST_NODE_RANK       the rank of this node, from 0; node 0 is the host of `parallel.rdzv_endpoint`
    HOLDFAST_RDZV_ENDPOINT   HOST:PORT of the rendezvous instead

Every node writes heartbeats to the store of the rendezvous, and passes on a request to stop. So a signal to one node
reaches the ranks of all nodes, even while they wait for a batch, where no collective runs. A node that fails or falls
silent ends the others with exit code 1, since their ranks may hang in a collective that nobody ends.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from holdfast.config import PROGRAMS, TrainerConfig, program_config
from holdfast.config.load import read_toml
from holdfast.config.preference import DpoConfig
from holdfast.config.training import ParallelConfig, TrainingCommand
from holdfast.errors import ConfigError, HoldfastError, RankLost, is_storage_failure
from holdfast.process.child import (
    available_cores,
    die_with_launcher,
    die_with_parent,
    exit_code_of,
    heavy_imports,
    keep_date,
    run_reporting_errors,
    set_thread_environment,
    set_up_logging,
)
from holdfast.process.events import report
from holdfast.process.gpus import VISIBLE_DEVICES_ENV
from holdfast.process.heartbeat import awake_s, does, start_heartbeat
from holdfast.process.imports import protect_children
from holdfast.process.scratch import scratch_directory
from holdfast.run.inputs import ask_hub
from holdfast.run.run_dir import RunDir
from holdfast.trainer.stop import SIGNALS, STOP_REQUEST, StopRequest

NODE_RANK_ENV = "HOLDFAST_NODE_RANK"
"""Which of the nodes this one is, from 0."""
ENDPOINT_ENV = "HOLDFAST_RDZV_ENDPOINT"
"""HOST:PORT where the nodes of this attempt meet; unset: that of the configuration."""

_PERIOD_S = 0.2
SILENT_S = 30.0
# What the others get to end by themselves when the store is gone: at the end of a run it goes first.
_ENDING_S = 5.0
_log = logging.getLogger("trainer")


def node_rank(parallel: ParallelConfig) -> int:
    """Return which of the nodes this one is.

    Raises:
        ConfigError: nobody said so, or said something else; or there is no place to meet at.
    """
    if parallel.nodes == 1:
        return 0
    said = os.environ.get(NODE_RANK_ENV, "")
    if not said.isdecimal() or int(said) >= parallel.nodes:
        raise ConfigError(
            f"parallel.nodes = {parallel.nodes} takes {NODE_RANK_ENV}, the number of this node from 0 to "
            f"{parallel.nodes - 1}, from the environment, which has '{said}'. `sft`, `dpo`, `reward-model` and "
            "`trainer`, started on every node, set it themselves."
        )
    if parallel.rdzv_endpoint is None and ENDPOINT_ENV not in os.environ:
        raise ConfigError(f"parallel.nodes = {parallel.nodes} needs parallel.rdzv_endpoint, where the nodes meet")
    return int(said)


def meeting_point(parallel: ParallelConfig) -> tuple[str, int]:
    """Return host and port where the nodes of this attempt meet."""
    endpoint = os.environ.get(ENDPOINT_ENV, parallel.rdzv_endpoint)
    return parallel.model_copy(update={"rdzv_endpoint": endpoint}).rendezvous


class Store(Protocol):
    """What of torch's stores is used."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class NodeLink:
    """Keeps this node in touch with the others for as long as its ranks run.

    Args:
        connect: opens the store of the rendezvous; may wait until it is there.
        rank: of this node; node 0 has the store.
        nodes: how many there are.
        stop: the request of this node's ranks.
        lose: called with the reason when another node is lost, from the thread of this link.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        rank: int,
        nodes: int,
        stop: StopRequest,
        lose: Callable[[str], object],
        silent_s: float = SILENT_S,
        ending_s: float = _ENDING_S,
    ) -> None:
        self._connect = connect
        self._rank = rank
        # All look at node 0, and node 0 at all: its end is that of the store.
        self._others = [node for node in range(nodes) if node != rank] if rank == 0 else [0]
        self._stop = stop
        self._lose = lose
        self._silent_s = silent_s
        self._ending_s = ending_s
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="nodes", daemon=True).start()

    def end(self) -> None:
        """Watch no more: the ranks of this node have ended."""
        self._ended.set()

    def _run(self) -> None:
        try:
            store = self._connect()
            count = 0
            while not self._ended.wait(_PERIOD_S):
                count += 1
                store.set(f"holdfast/beat/{self._rank}", str(count))
                self._pass_on_stop(store)
                lost = self._silent(store)
                if lost is not None:
                    self._lose(lost)
                    return
        except RuntimeError as error:  # torch's: the connection is broken, or never was one
            if not self._ended.wait(self._ending_s):
                self._lose(f"node 0 cannot be reached: {str(error).splitlines()[0]}")

    def _pass_on_stop(self, store: Store) -> None:
        number = self._stop.signal_number()
        if number:
            store.set("holdfast/stop", str(number))
        elif store.check(["holdfast/stop"]):
            self._stop.ask(int(store.get("holdfast/stop")))

    def _silent(self, store: Store) -> str | None:
        """Return which node has given no sign of life for too long, if any has."""
        now = awake_s()
        for node in self._others:
            key = f"holdfast/beat/{node}"
            beat = store.get(key) if store.check([key]) else b""
            heard, since = self._heard.get(node, (None, now))
            if beat != heard:
                self._heard[node] = (beat, now)
            elif beat and now - since > self._silent_s:  # one that never beat is waited for by the rendezvous
                return f"node {node} has sent no heartbeat for {now - since:.0f} s"
        return None


def link_nodes(endpoint: tuple[str, int], *, rank: int, nodes: int, timeout_s: float, stop: StopRequest) -> NodeLink:
    """Return the link of this process to the other nodes; one that is lost ends this process with exit code 1."""

    def connect() -> Store:
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=timeout_s)
        return TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timeout)

    def lose(reason: str) -> None:
        _log.error("ending: %s", reason)
        # At once, and the kernel ends the ranks: the main thread may wait for them, and they for a collective.
        os._exit(1)

    return NodeLink(connect, rank=rank, nodes=nodes, stop=stop, lose=lose)


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
    config = read_toml(program_config(program), config_path)
    if config.ckpt is not None:
        STOP_REQUEST.listen()
    if isinstance(config, TrainerConfig):
        does("its start", bound_s=config.startup_timeout_s)
    module = _module_of(program)
    if config.parallel.device == "cuda":
        # Here, where torch is imported: it reads its environment once.
        importlib.import_module("holdfast.trainer.mesh").set_numerics(deterministic=config.deterministic)
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


def _ask_hub(config: TrainingCommand) -> None:
    """Ask the hub for the models of a run that no directory holds: what is wrong with them costs no import of torch."""
    ask_hub(config.model.name, key="model.name")
    if config.model.tokenizer:
        ask_hub(config.model.tokenizer, key="model.tokenizer", file="tokenizer.json")
    if isinstance(config, DpoConfig) and config.loss.reference_model:
        ask_hub(config.loss.reference_model, key="loss.reference_model")


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
    config = read_toml(program_config(arguments.program), arguments.config)
    keep_date(RunDir(config.output_dir).created_unix_s())
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
    _ask_hub(config)
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
