"""The adapter of a checkpoint as a directory: alone, as peft loads it, or merged into the weights it belongs to."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import CheckpointError, ConfigError
from holdfast.shared.files import manifest
from holdfast.shared.files.adapter import (
    ADAPTER_DIR,
    ADAPTER_NAME,
    PEFT_PREFIX,
    adapted_matrices,
    read_base,
    read_scaling,
)
from holdfast.shared.files.checkpoints import MODEL_DIR
from holdfast.trainer.conversion.models import meta_model
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
from holdfast.trainer.models.lora import HEAD, digest_of, merged, save_factors
from holdfast.trainer.models.pretrained import initial_weights, is_classifier, load_model_config, trained_tensors
from holdfast.trainer.models.tensor_layout import TensorLayout, names_in_files

_MODEL = "model."


def export_adapter(request: Export, reader: TensorReader) -> Written:
    """Write the adapter of a committed checkpoint, merged where `request.base` says into what.

    Raises:
        ConfigError: options that do not go with it.
        CheckpointError: `request.base` has other weights than those that the adapter was trained on.
        SaveError: the storage failed; nothing is left behind.
    """
    if request.model is not None:
        raise ConfigError("--model is for checkpoints without model/config.json; this one has it: leave it out")
    names = [name for name in reader.saved if name.startswith(_MODEL)]
    factors = {name.removeprefix(_MODEL): reader.read(name) for name in names}
    if request.base is None:
        return _write_alone(request, factors)
    return _write_merged(request, request.base, factors)


def _write_alone(request: Export, factors: dict[str, Tensor]) -> Written:
    if request.dtype is not None or request.max_file_bytes is not None:
        raise ConfigError(
            "an adapter alone is one file in float32: leave out --dtype and --max-shard-size, or name the weights "
            "to merge it into with --base"
        )
    step, target = request.step_directory, request.target
    with new_directory(target) as directory:
        shutil.copytree(step / MODEL_DIR / ADAPTER_DIR, directory, dirs_exist_ok=True)
        size = sum(factor.nbytes for factor in factors.values())
        writer = SafetensorsWriter(directory, max_file_bytes=size, name=Path(ADAPTER_NAME).stem)
        for name, factor in factors.items():
            writer.add(f"{PEFT_PREFIX}{name}", factor)
        return commit(directory, target, writer, torch.float32, manifest.read_manifest(step))


def _write_merged(request: Export, base_name: str, factors: dict[str, Tensor]) -> Written:
    """Hold the whole model in float32, and compare it with what the adapter was trained on before writing."""
    step, target = request.step_directory, request.target
    adapter = step / MODEL_DIR / ADAPTER_DIR
    scale, trained_on = read_scaling(adapter).scale, read_base(adapter)
    base, layout = _base(base_name, scores=HEAD in factors)
    digest = digest_of(base, layout)
    if digest != trained_on.digest:
        raise CheckpointError(
            f"--base {base_name} has other weights (digest {digest}) than the adapter of {step} was trained on: those "
            f"of '{trained_on.name}' ({trained_on.digest})"
        )
    matrices, heads = adapted_matrices(factors), [name for name in factors if name == HEAD]
    dtype = published_dtype(request, torch.float32)
    with new_directory(target) as directory:
        copy_description(step, directory)
        set_dtype(directory / "config.json", dtype)
        save_factors(factors, directory / ADAPTER_DIR)
        writer = SafetensorsWriter(directory, max_file_bytes=request.max_file_bytes)

        def whole(name: str) -> Tensor:
            if name == HEAD:
                return factors[HEAD]
            if name not in matrices:
                return base[name]
            a_RI, b_OR = (factors[factor] for factor in matrices[name])
            return merged(base[name], a_RI, b_OR, scale=scale)

        for name, tensor in layout.to_files((name, whole(name)) for name in [*base, *heads]):
            writer.add(name, in_dtype(tensor, dtype).contiguous())
        return commit(directory, target, writer, dtype, manifest.read_manifest(step))


def _base(name: str, *, scores: bool) -> tuple[dict[str, Tensor], TensorLayout]:
    """Return the weights that adapters belong to, and how they lie in files.

    Args:
        scores: whether they are of a model that scores sequences: then without the head of either kind of model.
    """
    model_config = load_model_config(name)
    if not scores:
        base = initial_weights(TrainedModelConfig(name=name), model_config, seed=0)
        return base, TensorLayout(meta_model(name), names_in_files(name))
    kind = AutoModelForSequenceClassification if is_classifier(model_config) else AutoModelForCausalLM
    model_config.num_labels = 1
    source = initial_weights(TrainedModelConfig(name=name), model_config, seed=0, kind=kind)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(model_config, dtype=torch.float32)
    base = {name: source[name] for name in trained_tensors(model) if name != HEAD}
    return base, TensorLayout(model, names_in_files(name))
