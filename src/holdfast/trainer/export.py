"""Converts checkpoints to Hugging Face directories and back, for `ckpt export`, `promote` and `import`.

`export` writes weights that from_pretrained and vLLM load. `export_adapter` writes a LoRA adapter alone, as peft loads
it, or merged into the weights that it belongs to. `import_weights` turns weights of any kind into a directory to start
from. Reading goes tensor by tensor, for any number of writing ranks.

An import runs in one process, which holds the whole model in float32. float32 keeps every value of 16-bit files, and is
the dtype of the trainer's master weights.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from holdfast.config.base import DType
from holdfast.errors import CheckpointError, ConfigError, SaveError
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR
from holdfast.run.manifest import Manifest
from holdfast.run.weights import ADAPTER_DIR, ADAPTER_NAME, PEFT_PREFIX, adapted_matrices, read_base, read_scaling
from holdfast.trainer.checkpoint.dcp import IndexReader
from holdfast.trainer.model.build import is_classifier, load_model_config, open_weights, trained_tensors
from holdfast.trainer.model.lora import HEAD, digest_of, merged, save_factors
from holdfast.trainer.model.tensor_names import DTYPES, SafetensorsWriter, TensorLayout, names_in_files


def meta_model(name: str, *, num_labels: int | None = None) -> PreTrainedModel:
    """Return a model without memory, for the names and shapes of its tensors.

    Args:
        num_labels: of a model that scores sequences, whatever `name` is; None: the kind of model that `name` is.

    Raises:
        DataError: there is no such model config.
    """
    config = load_model_config(name)
    if num_labels is not None:
        config.num_labels = num_labels
    scores = num_labels is not None or is_classifier(config)
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def check_shapes(found: Mapping[str, torch.Size], model: PreTrainedModel, what: str) -> None:
    """Compare names and shapes with those of `model`, tied tensors once.

    Raises:
        CheckpointError: beginning with `what`, naming missing, surplus and differing tensors.
    """
    expected = trained_tensors(model)
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    reshaped = [
        f"{name} {tuple(found[name])} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name] != tensor.shape
    ]
    reasons = [f"missing: {_some(missing)}"] if missing else []
    reasons += [f"surplus: {_some(surplus)}"] if surplus else []
    reasons += [f"of another shape: {_some(reshaped)}"] if reshaped else []
    if reasons:
        raise CheckpointError(f"{what}: {'; '.join(reasons)}")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def describe_model(directory: Path, name: str, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write config.json, generation_config.json and the tokenizer of the model `name`; say if there is none."""
    config = AutoConfig.from_pretrained(name)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    for what, source in (("generation config", GenerationConfig), ("tokenizer", AutoTokenizer)):
        try:
            found: Any = source.from_pretrained(name)
        except (OSError, ValueError):
            print(f"note: '{name}' has no {what}; none is written", file=sys.stderr)
            continue
        found.save_pretrained(directory)


@dataclass
class Group:
    """Tensors whose names begin alike, such as `model` or `optim`."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


class TensorReader:
    """Reads single tensors of a directory without a process group; the index is read once.

    The index is read without running code, whosever it is.
    """

    def __init__(self, directory: Path) -> None:
        """Raises: CheckpointError: there is no index, or it cannot be read."""
        self._directory = directory
        self._reader = IndexReader(directory)
        self.saved = self._reader.tensors()
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, name: str) -> Tensor:
        """Return a tensor, whole, on the CPU.

        Raises:
            CheckpointError: its data is missing or cannot be read.
        """
        entry = self.saved[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            raise CheckpointError(f"{name} cannot be read from {self._directory}: {error}") from error
        return tensor


def describe(directory: Path) -> dict[str, Group]:
    """Count the tensors of a directory by the first part of their names; no data is read.

    Raises:
        CheckpointError: the index of the tensors is not there or cannot be read.
    """
    groups: dict[str, Group] = {}
    for name, entry in TensorReader(directory).saved.items():
        group = groups.setdefault(name.split(".", 1)[0], Group())
        group.tensors += 1
        group.elements += entry.size.numel()
        group.bytes += entry.size.numel() * entry.properties.dtype.itemsize
    return groups


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
    dtype: DType | None = None
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
    temporary = atomic.temporary_sibling(final)
    descriptor = None
    try:
        atomic.make_directory(final.parent)
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
    atomic.publish_directory(directory, final)
    return Written(
        directory=str(final),
        dtype=str(dtype).removeprefix("torch."),
        tensors=writer.num_tensors,
        parameters=writer.num_elements,
        files=sum(name.endswith(".safetensors") for name in files),
        bytes=writer.num_bytes,
    )


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
    model = meta_model(name, num_labels=1) if scores else meta_model(name)
    read = open_weights(model, name, without=[HEAD] if scores else [])
    model.to_empty(device="cpu")
    model.tie_weights()
    base = {key: tensor for key, tensor in trained_tensors(model).items() if not scores or key != HEAD}
    read(base)
    return base, TensorLayout(model, names_in_files(name))


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
    expected = meta_model(model)
    found = {name.removeprefix(_MODEL): entry.size for name, entry in reader.saved.items() if name.startswith(_MODEL)}
    check_shapes(found, expected, f"{step} is not the model '{model}'")
    describe_model(directory, model, expected, dtype)
