"""Weights of a checkpoint as a Hugging Face directory that from_pretrained and vLLM load."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tomli
import torch
from torch import Tensor

from holdfast.shared.errors import CheckpointError, SaveError
from holdfast.shared.files import durable, manifest
from holdfast.shared.files.adapter import adapted_matrices
from holdfast.shared.files.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR
from holdfast.shared.files.manifest import Manifest
from holdfast.trainer.conversion.reading import TensorReader
from holdfast.trainer.models.hf_files import DTYPES, SafetensorsWriter

if TYPE_CHECKING:
    from holdfast.trainer.models.tensor_layout import TensorLayout

DTypeName = Literal["float32", "bfloat16"]
_MODEL = "model."


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


def export(request: Export) -> Written:
    """Write the model of a committed checkpoint; the caller has verified it.

    Raises:
        CheckpointError: it holds no model, or not the one that `request.model` describes.
        SaveError: the storage failed; nothing is left behind.
    """
    step = request.step_directory
    reader = TensorReader(step / TRAINER_DIR)
    names = [name for name in reader.saved if name.startswith(_MODEL)]
    if not names:
        raise CheckpointError(
            f"{step} holds no tensors named 'model.*'; it has {', '.join(list(reader.saved)[:3])} ..."
        )
    if adapted_matrices(names):
        from holdfast.trainer.conversion.adapters import export_adapter  # transformers: seconds

        return export_adapter(request, reader)
    if request.base is not None:
        raise CheckpointError(f"{step} holds whole weights, not a LoRA adapter: leave out --base")
    dtype = published_dtype(request, reader.saved[names[0]].properties.dtype)
    source = manifest.read_manifest(step)
    with new_directory(request.target) as directory:
        _write_description(directory, step, request.model, reader, dtype)
        writer = SafetensorsWriter(directory, max_file_bytes=request.max_file_bytes)
        tensors = ((name.removeprefix(_MODEL), reader.read(name)) for name in names)
        layout = _layout_of(step, request.model)
        for name, tensor in layout.to_files(tensors) if layout is not None else tensors:
            writer.add(name, in_dtype(tensor, dtype).contiguous())
        return commit(directory, request.target, writer, dtype, source)


def _layout_of(step: Path, model: str | None) -> TensorLayout | None:
    """Return the layout of files: that of `model`, else what the checkpoint says; None: as in memory."""
    if model is None and not (step / MODEL_DIR / NAMES_NAME).exists():
        return None
    from holdfast.trainer.conversion.models import meta_model
    from holdfast.trainer.models.tensor_layout import TensorLayout, names_in_files  # transformers: seconds

    described = model or str(step / MODEL_DIR)
    return TensorLayout(meta_model(described), names_in_files(described))


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in `dtype`, others as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def published_dtype(request: Export, saved: torch.dtype) -> torch.dtype:
    """Return the dtype asked for, else that in which the run publishes its weights; `saved` where there is none."""
    path = request.step_directory / TRAINER_DIR / "config.toml"
    of_run = tomli.loads(path.read_text()).get("model", {}).get("dtype") if path.exists() else None
    return DTYPES.get(request.dtype or of_run or "", saved)


def _write_description(
    directory: Path, step: Path, model: str | None, reader: TensorReader, dtype: torch.dtype
) -> None:
    """Write config and tokenizer: those of the checkpoint, or those of `model`."""
    if model is None:
        if not (step / MODEL_DIR / "config.json").exists():
            raise CheckpointError(
                f"{step} has no {MODEL_DIR}/config.json: say with --model which model it is (a directory or hub id)"
            )
        copy_description(step, directory)
        set_dtype(directory / "config.json", dtype)
        return
    from holdfast.trainer.conversion.models import check_shapes, describe_model, meta_model  # transformers: seconds

    expected = meta_model(model)
    found = {name.removeprefix(_MODEL): entry.size for name, entry in reader.saved.items() if name.startswith(_MODEL)}
    check_shapes(found, expected, f"{step} is not the model '{model}'")
    describe_model(directory, model, expected, dtype)


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
