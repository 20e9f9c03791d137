"""Weights for a warm start, as far as they can be judged without loading them: bytes, names and shapes.

The trainer compares every tensor again when it fills the model (`holdfast.trainer.checkpoints.warm_start`); what is
refused here is refused before anything was started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import CheckpointError, nearest
from holdfast.shared.files import manifest
from holdfast.shared.files.adapter import PEFT_PREFIX
from holdfast.shared.files.checkpoints import MODEL_DIR, Kind, require_weights, verify_checkpoint
from holdfast.shared.files.manifest import MANIFEST_NAME, Verification

Shapes = dict[str, tuple[int, ...]]

WEIGHT_PREFIXES = ("", "model.", "app.model.", "module.", PEFT_PREFIX)
"""Behind which of these the names of the model lie, in files of other programs."""

# Keys of config.json that are a dimension of some tensor, or decide how many layers have tensors.
_SIZES = ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "vocab_size")
_WIDTHS = ("hidden_size", "n_embd")
_MOST_HEADER_BYTES = 1 << 28


def check_warm_start(path: Path, model: TrainedModelConfig, *, how: Verification) -> None:
    """Refuse weights that are damaged, or certainly not of `model`.

    What has a manifest is verified as `how` says. The config.json of checkpoints and Hugging Face
    directories is compared with that of the model. The names and shapes of safetensors files are compared with
    those of the model's own, or with its width where it has none.

    Raises:
        CheckpointError: saying what was found and what is needed.
    """
    kind = require_weights(path)
    if kind is Kind.CHECKPOINT:
        verify_checkpoint(path, how=how)
    elif kind in (Kind.WEIGHTS, Kind.ADAPTER) and (path / MANIFEST_NAME).exists():
        manifest.verify(path, how=how)
    if kind is Kind.ADAPTER and model.lora is None:
        raise CheckpointError(
            f"{path} (ckpt.weights_only) holds a LoRA adapter and no weights. Train it on with --model.lora and the "
            "model that it belongs to as --model.name, or merge it: ckpt export STEP --to DIR --base NAME."
        )
    if model.lora is not None:
        return  # the adapter's tensors follow from rank and targets, which only the trainer knows
    own = Path(model.name).expanduser()
    config_of = {Kind.CHECKPOINT: path / MODEL_DIR, Kind.WEIGHTS: path, Kind.HUGGING_FACE: path}
    if kind in config_of:
        _compare_configs(config_of[kind] / "config.json", own / "config.json", path, model.name)
    if kind in (Kind.WEIGHTS, Kind.HUGGING_FACE, Kind.TENSORS):
        _compare_tensors(_shapes_at(path), own, path, model.name)


def _compare_configs(saved: Path, wanted: Path, path: Path, model_name: str) -> None:
    if not (saved.is_file() and wanted.is_file()):
        return
    old, new = _read_json(saved), _read_json(wanted)
    changed = [
        f"{key} is {old[key]} there, {new[key]} here"
        for key in _SIZES
        if key in old and key in new and old[key] != new[key]
    ]
    if changed:
        raise CheckpointError(
            f"{path} (ckpt.weights_only) is of another model than model.name = '{model_name}': {'; '.join(changed)}. "
            "The model is built as --model.name says, and all tensors must fit."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _compare_tensors(there: Shapes, own: Path, path: Path, model_name: str) -> None:
    """Refuse tensors of which not one fits the model, or one has the name of another shape."""
    if not there:
        return
    wanted = _shapes_at(own)
    if not wanted:
        _require_width(there, own, path, model_name)
        return
    prefix = max(WEIGHT_PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in there for name in wanted))
    shared = [name for name in wanted if f"{prefix}{name}" in there]
    if not shared:
        first = next(iter(wanted))
        raise CheckpointError(
            f"{path} (ckpt.weights_only) does not fit model.name = '{model_name}': none of its {len(there)} tensors "
            f"(such as {next(iter(there))}) has the name of one of the model's {len(wanted)} (such as {first})."
            f"{nearest(first, there)}"
        )
    wrong = [
        f"{name} is {there[f'{prefix}{name}']} there, {wanted[name]} here"
        for name in shared
        if there[f"{prefix}{name}"] != wanted[name]
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{path} (ckpt.weights_only) does not fit model.name = '{model_name}': {'; '.join(wrong[:3])}{more}"
        )


def _require_width(there: Mapping[str, tuple[int, ...]], own: Path, path: Path, model_name: str) -> None:
    """Where the model has a config.json alone: some tensor must have the width of its hidden states."""
    if not (own / "config.json").is_file():
        return
    config = _read_json(own / "config.json")
    widths = [config[key] for key in _WIDTHS if isinstance(config.get(key), int)]
    if widths and not any(widths[0] in shape for shape in there.values()):
        raise CheckpointError(
            f"{path} (ckpt.weights_only) does not fit model.name = '{model_name}': hidden states are {widths[0]} wide "
            f"there, and none of the {len(there)} tensors (such as {next(iter(there))}) has that dimension."
        )


def _shapes_at(path: Path) -> Shapes:
    """Return name -> shape of the safetensors at `path`, a file or a directory; empty where there are none."""
    files = [path] if path.suffix == ".safetensors" else sorted(path.glob("*.safetensors")) if path.is_dir() else []
    return {name: shape for file in files for name, shape in _header(file).items()}


def _header(file: Path) -> Shapes:
    """Read the table at the beginning of a safetensors file: 8 bytes of length, then JSON.

    Raises:
        CheckpointError: there is none, or the file ends before its tensors do.
    """
    try:
        with open(file, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header says that it is {length} bytes long")
            table = json.loads(content.read(length))
        entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
        needed = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if (size := file.stat().st_size) < needed:
            raise ValueError(f"it has {size} bytes of {needed}")
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
