"""What is checked before vLLM is imported, so that a mistake costs a second and not half a minute."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import InferenceConfig
from holdfast.config.base import ModelConfig, is_loopback
from holdfast.config.inference import ServerConfig
from holdfast.errors import ConfigError, DataError
from holdfast.process.events import report
from holdfast.protocol.inference import read_admin_token
from holdfast.run.inputs import check_max_len
from holdfast.run.weights import weights_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Preflight:
    """What the checks found out.

    Attributes:
        sock: bound to the configured address, not listening yet.
        admin_token: what the admin routes ask for; None: nothing, only this machine can reach them.
        model_dir: local directory of the model.
        tokenizer_dir: local directory of its tokenizer.
    """

    sock: socket.socket
    admin_token: str | None
    model_dir: Path
    tokenizer_dir: Path


def check(config: InferenceConfig, *, is_alone: bool) -> Preflight:
    """Check everything that can be checked without vLLM.

    Args:
        is_alone: started by `inference`, whose flags are those of other commands without `inference.` before them.

    Raises:
        ConfigError: the address or the admin token is at fault, or the model takes no sessions as long as asked for.
        DataError: the model directory is at fault.
    """
    admin_token = required_token(config.server)
    with contextlib.ExitStack() as unless_all_is_well:
        sock = unless_all_is_well.enter_context(bind(config.server))
        model_dir, tokenizer_dir = resolve_model(config)
        check_max_len(config, model_dir, key="model" if is_alone else "inference.model")
        unless_all_is_well.pop_all()
    return Preflight(sock=sock, admin_token=admin_token, model_dir=model_dir, tokenizer_dir=tokenizer_dir)


def required_token(server: ServerConfig) -> str | None:
    """Return the token that the admin routes ask for; None: none, on a server for this machine only.

    Raises:
        ConfigError: the server binds a public address and the token's variable is not set; or it holds no token.
    """
    token = read_admin_token(server.admin_token_env)
    if token is None and not is_loopback(server.host):
        raise ConfigError(
            f"server.host = '{server.host}' lets other machines replace the weights, so the admin routes need a "
            f"token: set the environment variable {server.admin_token_env}, or bind 127.0.0.1."
        )
    return token


def bind(server: ServerConfig) -> socket.socket:
    """Return a socket bound to the configured address; nothing is accepted before `listen`.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
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
    """Return the directories of the model and of its tokenizer, fetching them from the hub if need be.

    Raises:
        DataError: a directory is missing or incomplete, or the hub does not have the model.
    """
    directory = _local_directory(config.model.name, "model.name")
    config_file = directory / "config.json"
    try:
        json.loads(config_file.read_text())
    except FileNotFoundError:
        raise DataError(f"{directory} has no config.json: it is not a model directory (model.name)") from None
    except ValueError as error:
        raise DataError(f"{config_file} cannot be read: {error}") from None
    if config.model.load == "auto" and not weights_files(directory):
        raise DataError(
            f"{directory} holds no *.safetensors file. "
            "Name a model with weights, or start with --model.load dummy and push them."
        )
    tokenizer = _tokenizer_directory(config.model, directory)
    return directory, tokenizer


def _tokenizer_directory(model: ModelConfig, model_dir: Path) -> Path:
    directory = _local_directory(model.tokenizer, "model.tokenizer") if model.tokenizer else model_dir
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise DataError(
            f"{directory} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). "
            "Name the directory that has it with --model.tokenizer."
        )
    return directory


def _local_directory(name: str, key: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise DataError(f"{key} = '{name}' is a file, not a model directory")
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise DataError(f"{key} = '{name}': there is no such directory")
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
