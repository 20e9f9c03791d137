"""Weights of a checkpoint as a Hugging Face directory that from_pretrained and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdfast.shared.errors import CheckpointError
from holdfast.shared.files import manifest
from holdfast.shared.files.adapter import adapted_matrices
from holdfast.shared.files.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR
from holdfast.trainer.conversion.reading import TensorReader
from holdfast.trainer.conversion.writing import (
    Export,
    Written,
    commit,
    copy_description,
    in_dtype,
    new_directory,
    published_dtype,
    set_dtype,
)
from holdfast.trainer.models.hf_files import SafetensorsWriter

if TYPE_CHECKING:
    from holdfast.trainer.models.tensor_layout import TensorLayout

_MODEL = "model."


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
