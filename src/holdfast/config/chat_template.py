"""Tokenizers with another chat template: the files of both in one directory of the cache."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

_TEMPLATE = "chat_template.jinja"
# config.json tells transformers the tokenizer's class, and generation_config.json has the tokens that end a turn.
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "config.json", "generation_config.json",
)  # fmt: skip


def tokenizer_with(template: str, tokenizer: str) -> str:
    """Return a directory that holds the tokenizer of a directory, and in the place of its chat templates the file
    `template`. Its name is a digest of its files. Raise ValueError if a file cannot be read or written."""
    source = Path(tokenizer)
    if not source.is_dir():
        raise ValueError(
            f"has chat_template, which needs the tokenizer in a directory, and '{tokenizer}' is none: download it (hf "
            f"download {tokenizer} --local-dir DIR), and name the directory"
        )
    try:
        files = {name: (source / name).read_bytes() for name in _FILES if (source / name).is_file()}
        files |= {_TEMPLATE: Path(template).read_bytes()}
        files["tokenizer_config.json"] = _without_template(files.get("tokenizer_config.json", b"{}"))
        return str(_kept(files))
    except OSError as error:  # a full disk names no file
        where = error.filename or "the cache, $HOLDFAST_CACHE or ~/.cache/holdfast"
        raise ValueError(f"has chat_template = '{template}': {where}: {error.strerror}") from None


def _without_template(settings: bytes) -> bytes:
    with suppress(ValueError):  # damaged settings are refused by who loads the tokenizer
        found = json.loads(settings)
        if isinstance(found, dict) and found.pop("chat_template", None) is not None:
            return json.dumps(found, indent=2).encode()
    return settings


def _kept(files: Mapping[str, bytes]) -> Path:
    """Return the directory of the cache that holds `files`, after it is made if need be."""
    digest = xxhash.xxh3_128()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    cache = Path(os.path.expanduser(os.environ.get("HOLDFAST_CACHE") or "~/.cache/holdfast"), "tokenizers")  # noqa: PTH111
    kept = cache / digest.hexdigest()
    if _holds(kept, files):
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".tmp-") as made:
        for name, content in files.items():
            Path(made, name).write_bytes(content)
        if kept.is_dir() and not _holds(kept, files):  # cut by a full disk or a power cut
            shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError):  # another process was first
            Path(made).rename(kept)
    if not _holds(kept, files):
        raise FileNotFoundError(2, "the files could not be written", str(kept))
    return kept


def _holds(directory: Path, files: Mapping[str, bytes]) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return all((directory / name).read_bytes() == content for name, content in files.items())
    return False
