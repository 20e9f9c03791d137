"""Weights of any kind as a Hugging Face directory for a warm start.

A process of one, which holds the whole model in float32: that keeps every value of 16-bit files, and
it is the dtype of the trainer's master weights.
"""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.shared.errors import CheckpointError
from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import MODEL_DIR, Kind, kind_of
from holdfast.shared.files.manifest import MANIFEST_NAME
from holdfast.trainer.checkpoints.warm_start import load_weights_only
from holdfast.trainer.conversion.models import describe_model, meta_model
from holdfast.trainer.conversion.writing import Written, commit, new_directory
from holdfast.trainer.models.hf_files import SafetensorsWriter
from holdfast.trainer.models.pretrained import trained_tensors
from holdfast.trainer.models.tensor_layout import TensorLayout, names_in_files


def import_weights(source: Path, target: Path, model_name: str | None = None) -> Written:
    """Read weights of any kind, compare them with the config, and write them as files of ours.

    Args:
        source: file or directory.
        target: the directory to publish; it must not exist.
        model_name: where config and tokenizer come from; None: `source` itself.

    Raises:
        CheckpointError: there are no weights, or they are not those of the model: missing and surplus
            tensors and other shapes are named.
        SaveError: the storage failed; nothing is left behind.
    """
    name = model_name or _described_by(source)
    model = meta_model(name)
    model.to_empty(device="cpu")
    model.tie_weights()
    tensors = trained_tensors(model)
    layout = TensorLayout(model, names_in_files(name))
    load_weights_only(tensors, source, layout=layout)
    with new_directory(target) as directory:
        describe_model(directory, name, model, torch.float32)
        writer = SafetensorsWriter(directory)
        for tensor_name, tensor in layout.to_files(tensors.items()):
            writer.add(tensor_name, tensor.contiguous())
        listing = manifest.read_manifest(source) if (source / MANIFEST_NAME).exists() else None
        return commit(directory, target, writer, torch.float32, listing)


def _described_by(source: Path) -> str:
    """Return the directory whose config.json says which model the weights are of.

    Raises:
        CheckpointError: there is none.
    """
    kind = kind_of(source)
    directory = {Kind.CHECKPOINT: source / MODEL_DIR, Kind.TENSORS: source.parent}.get(kind, source)
    if not (directory / "config.json").exists():
        raise CheckpointError(
            f"{source} ({kind}) comes without a config.json: say with --model which model it is (a directory or hub id)"
        )
    return str(directory)
