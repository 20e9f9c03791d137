"""The inference server: `python -m holdfast.inference.main <resolved.toml> [<run directory>]`.

The `inference` command writes the resolved configuration and starts this module. `rl` also names the run directory:
the server then serves that run only. Before vLLM is imported, which takes half a minute, address, token and model are
checked.
"""

import contextlib
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path

from holdfast.config import InferenceConfig
from holdfast.config.base import DeviceType, is_loopback
from holdfast.config.inference import ServerConfig
from holdfast.config.load import read_toml
from holdfast.config.resolved import choose_for_engine
from holdfast.errors import ConfigError, DataError
from holdfast.inference import Preflight
from holdfast.process import child
from holdfast.process.events import report
from holdfast.process.gpus import require_vllm
from holdfast.process.heartbeat import start_heartbeat
from holdfast.process.imports import leave_out_working_directory, protect_children
from holdfast.process.scratch import SHORT_HOME, scratch_directory, scratch_name
from holdfast.protocol.inference import Owner, read_admin_token
from holdfast.run.inputs import check_max_len, check_model_path, check_tokenizer_path, check_weights_path
from holdfast.run.run_dir import RunDir, owner_of

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
# Most bytes of a Unix socket's path, without `/UUID` and eight random characters.
_MOST_BYTES_OF_HOME = 107 - 37 - 8

_ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The model is a local directory by now.
    "HF_HUB_OFFLINE": "1",
}
_ON: dict[DeviceType, dict[str, str]] = {
    "cpu": {
        # One engine process per server, without a worker process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # With several threads, a split over the cache would make logprobs depend on the batch.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    },
    "cuda": {
        # A fork of a process that has touched CUDA cannot use it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn"
    },
}


def main(argv: list[str]) -> int:
    """Serve the configuration in the file that `argv` names; return the exit code."""
    child.set_up_logging("inference")
    child.die_with_launcher()
    protect_children()
    leave_out_working_directory()
    start_heartbeat()
    return child.exit_code_of(lambda: run(*_read_arguments(argv)))


def _read_arguments(argv: list[str]) -> tuple[InferenceConfig, Owner | None]:
    if len(argv) not in (1, 2):
        raise ConfigError(
            f"usage: python -m holdfast.inference.main <resolved.toml> [<run directory>], got {len(argv)} arguments"
        )
    return read_toml(InferenceConfig, argv[0]), owner_of(RunDir(Path(argv[1]))) if len(argv) == 2 else None


def run(config: InferenceConfig, owner: Owner | None = None) -> int:
    """Check, import vLLM and serve the run `owner`, or any run; return the exit code."""
    home = Path(tempfile.gettempdir())
    is_short = len(os.fsencode(home / scratch_name())) <= _MOST_BYTES_OF_HOME
    with scratch_directory(home if is_short else SHORT_HOME) as scratch:
        return _run(config, owner, scratch)


def _run(config: InferenceConfig, owner: Owner | None, scratch: Path) -> int:
    child.allow_many_connections()
    device = require_vllm()
    preflight: Preflight = check(config, key="model" if owner is None else "inference.model")
    choose_for_engine(config, device)
    set_environment(config, device)
    _keep_temporary_files_in(scratch)
    report("loading vllm")
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # Takes many seconds, and reads the environment that was just set.
    with child.heavy_imports():
        from holdfast.inference.server import serve

    return serve(config, preflight, owner=owner)


def _keep_temporary_files_in(scratch: Path) -> None:
    """Have vLLM put its sockets and rendezvous files into `scratch`: a killed engine leaves them there."""
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(scratch))
    home = tempfile.gettempdir()
    if scratch.parent != Path(home):
        return  # large files belong where the user wants them
    # The next server uses the compiled code of torch again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{home}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None  # so that it looks again


def set_environment(config: InferenceConfig, device: DeviceType) -> None:
    """Set the variables that vLLM and torch read at import, unless the user has set them."""
    threads = config.engine.threads
    if device == "cpu":
        threads = threads or max(1, child.available_cores() // 2)
    if threads is not None:  # on GPUs vLLM's own choice is better
        child.set_thread_environment(threads)
    for name, value in (_ANYWHERE | _ON[device]).items():
        os.environ.setdefault(name, value)
    if config.deterministic and device == "cuda":
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
    if config.engine.eager and device == "cpu":
        # vLLM's sampler would compile one small function at the first request, for 12 s.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def check(config: InferenceConfig, *, key: str = "model") -> Preflight:
    """Check everything that can be checked without vLLM. `key`: of the section of the served model in the command that
    the user gave. Raise ConfigError if the address or the admin token is at fault, or `max_len` is more than the model
    takes; DataError if the model directory is at fault."""
    admin_token = required_token(config.server)
    with contextlib.ExitStack() as unless_all_is_well:
        sock = unless_all_is_well.enter_context(bind(config.server))
        model_dir, tokenizer_dir = resolve_model(config)
        check_max_len(config, model_dir, key=key)
        unless_all_is_well.pop_all()
    return Preflight(sock=sock, admin_token=admin_token, model_dir=model_dir, tokenizer_dir=tokenizer_dir)


def required_token(server: ServerConfig) -> str | None:
    """Return the token for admin routes; None on loopback without a token. Raise ConfigError if it cannot be used."""
    token = read_admin_token(server.admin_token_env)
    if token is None and not is_loopback(server.host):
        raise ConfigError(
            f"server.host = '{server.host}' lets other machines replace the weights, so the admin routes need a "
            f"token: set the environment variable {server.admin_token_env}, or bind 127.0.0.1."
        )
    return token


def bind(server: ServerConfig) -> socket.socket:
    """Return a socket bound to the configured address, not listening. Raise ConfigError if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror or error}. "
            "Stop what uses the port, or choose another address with --server.host and --server.port."
        ) from None
    return sock


def resolve_model(config: InferenceConfig) -> tuple[Path, Path]:
    """Return the directories of model and tokenizer, fetched from the hub if need be. Raise DataError if they lack."""
    check_model_path(config.model.name, key="model.name")
    directory = _local_directory(config.model.name, "model.name")
    if config.model.load == "auto":
        check_weights_path(str(directory), needs_index=False)
    tokenizer = _local_directory(config.model.tokenizer, "model.tokenizer") if config.model.tokenizer else directory
    check_tokenizer_path(str(tokenizer), key="model.tokenizer")
    return directory, tokenizer


def _local_directory(name: str, key: str) -> Path:
    path = Path(name)
    if path.is_dir():
        return path.absolute()
    report(f"asking the hub for {name}")
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise DataError(
            f"{key} = '{name}': there is no such directory, and the hub gave no such model "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'})"
        ) from None


if __name__ == "__mp_main__":
    # A spawned engine or worker: while it imports vLLM, it would not notice for minutes that the server died.
    child.die_with_parent()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of vLLM's clients must not delay or change the exit.
    os._exit(code)
