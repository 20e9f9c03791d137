"""Hugging Face directories: what to write, in which dtype, and how a directory of weights is committed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tomli
import torch
from torch import Tensor

from holdfast.shared.errors import SaveError
from holdfast.shared.files import durable, manifest
from holdfast.shared.files.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR
from holdfast.shared.files.manifest import Manifest
from holdfast.trainer.models.hf_files import DTYPES, SafetensorsWriter

DTypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Export:
    """What to write of a checkpoint, and how.

    Attributes:
        step_directory: a committed checkpoint, verified by the caller.
        target: the directory to publish; it must not exist.
        dtype: of the floating-point tensors; None: as the run publishes its weights.
        max_file_bytes: no file is larger, unless one tensor alone is; None: 4 GiB.
        model: where config and tokenizer come from when the checkpoint has none.
        base: of a run with LoRA, the weights to merge the adapter into; None: the adapter alone is written.
    """

    step_directory: Path
    target: Path
    dtype: DTypeName | None = None
    max_file_bytes: int | None = None
    model: str | None = None
    base: str | None = None


@dataclass(frozen=True)
class Written:
    """What an export or import wrote."""

    directory: str
    dtype: str
    tensors: int
    parameters: int
    files: int
    bytes: int


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in `dtype`, others as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def published_dtype(request: Export, saved: torch.dtype) -> torch.dtype:
    """Return the dtype asked for, else that in which the run publishes its weights; `saved` where there is none."""
    path = request.step_directory / TRAINER_DIR / "config.toml"
    of_run = tomli.loads(path.read_text()).get("model", {}).get("dtype") if path.exists() else None
    return DTYPES.get(request.dtype or of_run or "", saved)


def copy_description(step: Path, directory: Path) -> None:
    """Copy config, tokenizer and adapter settings of the checkpoint `step`."""
    shutil.copytree(step / MODEL_DIR, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(NAMES_NAME))


def set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Make a config.json say `dtype`; a file that says so already keeps its bytes."""
    config = json.loads(path.read_text())
    name = str(dtype).removeprefix("torch.")
    if config.get("dtype") != name:
        path.write_text(json.dumps(config | {"dtype": name}, indent=2, sort_keys=True) + "\n")


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `final`, which goes away again when the block fails.

    Raises:
        SaveError: the storage failed.
    """
    temporary = durable.temporary_sibling(final)
    descriptor = None
    try:
        durable.make_directory(final.parent)
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # says to `ckpt prune` that its writer lives
        yield temporary
    except OSError as error:
        where = error.filename or final
        reason = error.strerror or error
        raise SaveError(f"{final} could not be written: {reason} ({where}). Nothing is left of it.") from None
    finally:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def commit(
    directory: Path, final: Path, writer: SafetensorsWriter, dtype: torch.dtype, source: Manifest | None
) -> Written:
    """Finish the files, write the manifest and give the directory its name.

    Args:
        dtype: what the answer says.
        source: manifest of the checkpoint that the weights come from, if any.
    """
    writer.close()
    files = manifest.describe_files(directory)
    listing = Manifest(
        kind="weights",
        step=source.step if source else 0,
        policy_version=source.policy_version if source else 0,
        files=files,
        libraries=manifest.library_versions(),
    )
    if source is not None:
        listing.run_id, listing.metrics, listing.fingerprints = source.run_id, source.metrics, source.fingerprints
    manifest.write_manifest(directory, listing)
    durable.publish_directory(directory, final)
    return Written(
        directory=str(final),
        dtype=str(dtype).removeprefix("torch."),
        tensors=writer.num_tensors,
        parameters=writer.num_elements,
        files=sum(name.endswith(".safetensors") for name in files),
        bytes=writer.num_bytes,
    )
