"""Whether the models and data that a configuration names by a local path are there, before anything reads them.

The launcher checks them before it starts a process, and whoever loads them checks again; hub ids pass.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.shared.errors import ConfigError, DataError

_DATA_FILES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
_OTHER_FILES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst", ".xz", ".bz2")


def check_model_path(name: str, *, key: str) -> None:
    """Refuse a local path without config.json; names of a hub (`owner/model`) pass, if no directory has that name.

    Raises:
        DataError: there is no such directory, or it holds no model.
    """
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).is_dir()
    if looks_local and not (Path(name) / "config.json").is_file():
        what = "has no config.json" if Path(name).is_dir() else "is not a directory"
        raise DataError(
            f"{key} = '{name}' {what} (from {Path.cwd()}). Give a directory with config.json, safetensors and "
            "tokenizer, or a hub id such as Qwen/Qwen3-0.6B."
        )


def check_weights_path(name: str) -> None:
    """Refuse a local directory without weights, as `model.name`.

    Raises:
        DataError: it has none that can be read.
    """
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise DataError(
            f"model.name = '{name}' has no *.safetensors. Set model.init = random to train from scratch; weights in "
            "other files are converted by `ckpt import`."
        )


def check_data_path(name: str, *, key: str) -> None:
    """Refuse a local file or directory that is not there, or a file of another kind; names of a hub pass.

    Raises:
        DataError: there is no such file or directory, or it cannot hold rows.
    """
    path = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.endswith((*_DATA_FILES, *_OTHER_FILES))
    if not path.exists() and (looks_local or name.count("/") != 1):
        raise DataError(f"{key} = '{name}': there is no such file or directory (from {Path.cwd()})")
    if path.is_file() and not name.endswith(_DATA_FILES):
        raise DataError(
            f"{key} = '{name}': use a .jsonl, .json or .parquet file (JSON also as .gz), a directory or a hub id"
        )


def check_cache_directory(name: str | None, *, key: str) -> None:
    """Refuse a directory for tokenised data that can neither be written to nor holds any; unset or empty passes.

    Raises:
        ConfigError: it is no directory, cannot be made, or is empty and cannot be written to.
    """
    if not name:
        return
    advice = f'Name a directory that can be written to, leave {key} out, or set it to "" to keep nothing.'
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(f"{key} = '{name}': there is no home directory. {advice}") from None
    # os.path: what is below a file, or below what may not be looked into, is not there.
    existing = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))  # noqa: PTH110
    if not existing.is_dir():
        raise ConfigError(f"{key} = '{name}': {existing} is no directory. {advice}")
    if not os.access(existing, os.W_OK | os.X_OK) and not (existing == path and _holds_something(path)):
        raise ConfigError(f"{key} = '{name}': {existing} cannot be written to. {advice}")


def _holds_something(directory: Path) -> bool:
    return os.access(directory, os.R_OK | os.X_OK) and any(directory.iterdir())
