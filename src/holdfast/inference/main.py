"""The inference server: `python -m holdfast.inference.main <resolved.toml> [<run directory>]`.

The `inference` command writes the resolved configuration and starts this module; `rl` also names the run that the
server is for, and for no other. Everything that can be wrong with it is checked before vLLM is imported.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from holdfast.config import InferenceConfig
from holdfast.config.devices import DeviceType
from holdfast.config.load import read_toml
from holdfast.config.resolved import choose_for_engine
from holdfast.errors import ConfigError
from holdfast.inference.preflight import Preflight, check
from holdfast.process.child import (
    allow_many_connections,
    available_cores,
    die_with_launcher,
    die_with_parent,
    exit_code_of,
    heavy_imports,
    set_thread_environment,
    set_up_logging,
)
from holdfast.process.events import report
from holdfast.process.gpus import require_vllm
from holdfast.process.heartbeat import start_heartbeat
from holdfast.process.imports import leave_out_working_directory, protect_children
from holdfast.process.scratch import SHORT_HOME, scratch_directory, scratch_name
from holdfast.protocol.inference import Owner
from holdfast.run.run_dir import RunDir, owner_of

# Of a Unix socket's path, with `/` and a UUID behind the directory, and eight random characters in its name.
_MOST_BYTES_OF_HOME = 107 - 37 - 8

_ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The model is a local directory by now.
    "HF_HUB_OFFLINE": "1",
}
_ON: dict[DeviceType, dict[str, str]] = {
    "cpu": {
        # No separate worker process: one engine process per server.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # With several threads, a split over the cache would make logprobs depend on the batch.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    },
    "cuda": {
        # A fork of a process that has touched CUDA cannot use it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    },
}


def main(argv: list[str]) -> int:
    """Serve the configuration in the file that `argv` names; return the exit code."""
    set_up_logging("inference")
    die_with_launcher()
    protect_children()
    leave_out_working_directory()
    start_heartbeat()
    return exit_code_of(lambda: run(*_read_arguments(argv)))


def _read_arguments(argv: list[str]) -> tuple[InferenceConfig, Owner | None]:
    if len(argv) not in (1, 2):
        raise ConfigError(
            f"usage: python -m holdfast.inference.main <resolved.toml> [<run directory>], got {len(argv)} arguments"
        )
    return read_toml(InferenceConfig, argv[0]), owner_of(RunDir(Path(argv[1]))) if len(argv) == 2 else None


def run(config: InferenceConfig, owner: Owner | None = None) -> int:
    """Check, import vLLM and serve; return the exit code.

    Args:
        owner: the run that the server is for; None: for whoever comes.

    Raises:
        HoldfastError: something that the user can be told in one message.
    """
    with scratch_directory(_home_of_sockets()) as scratch:
        return _run(config, owner, scratch)


def _home_of_sockets() -> Path:
    home = Path(tempfile.gettempdir())
    return home if len(os.fsencode(home / scratch_name())) <= _MOST_BYTES_OF_HOME else SHORT_HOME


def _run(config: InferenceConfig, owner: Owner | None, scratch: Path) -> int:
    allow_many_connections()
    device = require_vllm()
    preflight: Preflight = check(config, is_alone=owner is None)
    # A configuration that no command has resolved.
    choose_for_engine(config, device)
    set_environment(config, device)
    _keep_temporary_files_in(scratch)
    report("loading vllm")
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # Imported here because it takes many seconds, and reads the environment that was just set.
    with heavy_imports():
        from holdfast.inference.server import serve

    return serve(config, preflight, owner=owner)


def _keep_temporary_files_in(scratch: Path) -> None:
    """Have vLLM put there its sockets and the files by which its processes meet: it leaves those of a killed engine."""
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(scratch))
    home = tempfile.gettempdir()
    if scratch.parent != Path(home):
        return  # what is large belongs where the user wants it
    # What torch has compiled is for the next server as well.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{home}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None  # so that it looks again


def set_environment(config: InferenceConfig, device: DeviceType) -> None:
    """Set what vLLM and torch read at import; what the user has set stays."""
    threads = config.engine.threads
    if device == "cpu":
        threads = threads or max(1, available_cores() // 2)
    if threads is not None:  # on GPUs vLLM's own choice is better, and it makes it where none is exported
        set_thread_environment(threads)
    for name, value in (_ANYWHERE | _ON[device]).items():
        os.environ.setdefault(name, value)
    if config.deterministic and device == "cuda":
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
    if config.engine.eager and device == "cpu":
        # Its sampler would compile one small function at the first request, for 12 s.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


if __name__ == "__mp_main__":
    # A spawned engine, or a worker of one: before it has imported vLLM, it would wait minutes for a server that died.
    die_with_parent()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of vLLM's clients must not delay or change the exit.
    os._exit(code)
