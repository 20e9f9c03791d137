"""Converts checkpoints to Hugging Face directories, for `ckpt export`.

`export` writes weights that from_pretrained and vLLM load, tensor by tensor. With LoRA it writes the adapter only, as
peft loads it, or the merged weights.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tomli
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from holdfast.chat.tokenizer import complete_end_tokens, end_token_ids
from holdfast.config.base import DType
from holdfast.errors import CheckpointError, ConfigError, DataError, SaveError
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import MODEL_DIR, NAMES_NAME, TRAINER_DIR
from holdfast.run.manifest import Manifest
from holdfast.run.weights import ADAPTER_DIR, ADAPTER_NAME, PEFT_PREFIX, adapted_matrices, read_base, read_scaling
from holdfast.trainer.checkpoint.dcp import IndexReader, read_tensors
from holdfast.trainer.model.build import open_weights, trained_tensors
from holdfast.trainer.model.lora import HEAD, digest_of, merged, save_factors
from holdfast.trainer.model.model_config import is_classifier, load_model_config
from holdfast.trainer.model.safetensors_files import SafetensorsWriter
from holdfast.trainer.model.structure import buffer_frozen
from holdfast.trainer.model.tensor_names import DTYPES, TensorLayout, names_in_files


def meta_model(name: str, *, num_labels: int | None = None) -> PreTrainedModel:
    """Return a model without memory; with `num_labels` the model that scores sequences. Raise DataError if unknown."""
    config = load_model_config(name)
    if num_labels is not None:
        config.num_labels = num_labels
    scores = num_labels is not None or is_classifier(config)
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.float32)
    buffer_frozen(model)
    model.tie_weights()
    return model


@dataclass
class Group:
    """Tensors whose names begin alike, such as `model` or `optim`."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


class TensorReader:
    """Reads single tensors of a torch.distributed.checkpoint directory of any origin."""

    def __init__(self, directory: Path) -> None:
        self._reader = IndexReader(directory)
        self.saved = self._reader.tensors()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raise CheckpointError if its data is missing or cannot be read."""
        entry = self.saved[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_tensors({name: tensor}, self._reader)
        return tensor


def describe(directory: Path) -> dict[str, Group]:
    """Count the tensors of a directory by the first part of their names, from its index."""
    groups: dict[str, Group] = {}
    for name, entry in TensorReader(directory).saved.items():
        group = groups.setdefault(name.split(".", 1)[0], Group())
        group.tensors += 1
        group.elements += entry.size.numel()
        group.bytes += entry.size.numel() * entry.properties.dtype.itemsize
    return groups


@dataclass(frozen=True)
class Export:
    """Tensors to write of a verified checkpoint: by default in the dtype of published weights.

    Attributes:
        base: with LoRA, the weights to merge the adapter into; None: write the adapter only.
        add: writes further files into the new directory.
    """

    step_directory: Path
    target: Path
    dtype: DType | None = None
    base: str | None = None
    add: Callable[[Path], object] | None = None


@dataclass(frozen=True)
class Written:
    """The result of an export. `remark`: what loading needs beside the files."""

    directory: str
    dtype: str
    tensors: int
    parameters: int
    files: int
    bytes: int
    remark: str = ""


def published_dtype(request: Export, saved: torch.dtype) -> torch.dtype:
    """Return the requested dtype, else the dtype of the run's published weights, else `saved`."""
    path = request.step_directory / TRAINER_DIR / "config.toml"
    of_run = tomli.loads(path.read_text(encoding="utf-8")).get("model", {}).get("dtype") if path.exists() else None
    return DTYPES.get(request.dtype or of_run or "", saved)


def copy_description(step: Path, directory: Path) -> None:
    """Copy config, tokenizer and adapter settings of the checkpoint `step`."""
    shutil.copytree(step / MODEL_DIR, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(NAMES_NAME))
    complete_end_tokens(directory)  # of an older version's checkpoint


def set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set `dtype` in a config.json, unless it is set."""
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    if config.get("dtype") != name:
        path.write_text(json.dumps(config | {"dtype": name}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `final`, removed if the block fails. Raise SaveError if the storage fails."""
    temporary = atomic.temporary_sibling(final)
    try:
        atomic.make_directory(final.parent)
        temporary.mkdir()
        yield temporary
    except OSError as error:
        where = error.filename or final
        reason = error.strerror or error
        raise SaveError(f"{final} could not be written: {reason} ({where}). Nothing is left of it.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commit(directory: Path, request: Export, writer: SafetensorsWriter, dtype: torch.dtype) -> Written:
    """Finish the files, write the manifest and give the directory its name."""
    final, source = request.target, manifest.read_manifest(request.step_directory)
    if request.add is not None:
        request.add(directory)
    files = manifest.describe_files(directory, known=writer.close())
    listing = Manifest(
        kind="weights",
        step=source.step,
        policy_version=source.policy_version,
        files=files,
        run_id=source.run_id,
        metrics=source.metrics,
        fingerprints=source.fingerprints,
        libraries=manifest.library_versions(),
    )
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


def _write_alone(request: Export, factors: dict[str, Tensor]) -> Written:
    if request.dtype is not None:
        raise ConfigError(
            "an adapter alone is in float32: leave out --dtype, or name the weights to merge it into with --base"
        )
    step, target = request.step_directory, request.target
    with new_directory(target) as directory:
        shutil.copytree(step / MODEL_DIR / ADAPTER_DIR, directory, dirs_exist_ok=True)
        size = sum(factor.nbytes for factor in factors.values())
        writer = SafetensorsWriter(directory, max_file_bytes=size, name=Path(ADAPTER_NAME).stem)
        for name, factor in factors.items():
            writer.add(f"{PEFT_PREFIX}{name}", factor)
        written = commit(directory, request, writer, torch.float32)
    return replace(written, remark=_about_end_tokens(step))


def _about_end_tokens(step: Path) -> str:
    """Say which tokens end a turn by the checkpoint and not by the base, whose settings other programs use."""
    try:
        base = json.loads((step / MODEL_DIR / ADAPTER_DIR / "adapter_config.json").read_bytes())
        of_base, ends = end_token_ids(base["base_model_name_or_path"]), end_token_ids(str(step / MODEL_DIR))
    except (ConfigError, DataError, OSError, KeyError):
        return ""  # nobody knows the base here
    if {*ends} <= {*of_base}:
        return ""
    return (
        "WARNING: with the adapter, transformers and vLLM run on after a turn: generation_config.json of the base "
        f"has eos_token_id = {of_base}: generate with {ends}, or export merged weights with --base"
    )


def _write_merged(request: Export, base_name: str, factors: dict[str, Tensor]) -> Written:
    """Hold the whole base in float32, and compare it with the base of the adapter before writing."""
    step = request.step_directory
    adapter = step / MODEL_DIR / ADAPTER_DIR
    scale, trained_on = read_scaling(adapter).scale, read_base(adapter)
    model, base, layout = _base(base_name, scores=HEAD in factors)
    digest = digest_of(base, layout)
    if digest != trained_on.digest:
        raise CheckpointError(
            f"--base {base_name} has other weights (digest {digest}) than the adapter of {step} was trained on: those "
            f"of '{trained_on.name}' ({trained_on.digest})"
        )
    matrices, heads = adapted_matrices(factors), [name for name in factors if name == HEAD]

    def whole(name: str) -> Tensor:
        if name == HEAD:
            return factors[HEAD]
        if name not in matrices:
            return base[name]
        a_RI, b_OR = (factors[factor] for factor in matrices[name])
        return merged(base[name], a_RI, b_OR, scale=scale)

    dtype = published_dtype(request, torch.float32)
    tensors = layout.to_files(_cast(((name, whole(name)) for name in [*base, *heads]), model, dtype))
    return _write_whole(request, tensors, dtype, factors)


def _cast(
    tensors: Iterable[tuple[str, Tensor]], model: PreTrainedModel, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of `model` in the dtypes of published weights; see `whole_tensors`."""
    buffers = dict(model.named_buffers())
    for name, tensor in tensors:
        yield name, tensor if name in buffers else tensor.to(dtype)


def _write_whole(
    request: Export,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    factors: Mapping[str, Tensor] | None = None,
) -> Written:
    """Write tensors of files, and the adapter of `factors` beside them."""
    with new_directory(request.target) as directory:
        copy_description(request.step_directory, directory)
        set_dtype(directory / "config.json", dtype)
        if factors is not None:
            save_factors(factors, directory / ADAPTER_DIR)
        writer = SafetensorsWriter(directory)
        for name, tensor in tensors:
            writer.add(name, tensor.contiguous())
        return commit(directory, request, writer, dtype)


def _base(name: str, *, scores: bool) -> tuple[PreTrainedModel, dict[str, Tensor], TensorLayout]:
    """Return a model, its weights, without a head if the adapters score, and their layout in files."""
    model = meta_model(name, num_labels=1) if scores else meta_model(name)
    read = open_weights(model, name, without=[HEAD] if scores else [])
    model.to_empty(device="cpu")
    model.tie_weights()
    base = {key: tensor for key, tensor in trained_tensors(model).items() if not scores or key != HEAD}
    read(base)
    return model, base, TensorLayout(model, names_in_files(name))


def export(request: Export) -> Written:
    """Write the model of a committed checkpoint, which the caller has verified. Raise CheckpointError if it holds no
    model, or its adapter was trained on other weights than `request.base`; ConfigError for options that do not fit an
    adapter; SaveError if the storage failed; no file is left."""
    step = request.step_directory
    reader = TensorReader(step / TRAINER_DIR)
    names = [name for name in reader.saved if name.startswith(_MODEL)]
    if not names:
        raise CheckpointError(
            f"{step} holds no tensors named 'model.*'; it has {', '.join(list(reader.saved)[:3])} ..."
        )
    if adapted_matrices(names):
        factors = {name.removeprefix(_MODEL): reader.read(name) for name in names}
        return _write_merged(request, request.base, factors) if request.base else _write_alone(request, factors)
    if request.base is not None:
        raise CheckpointError(f"{step} holds whole weights, not a LoRA adapter: leave out --base")
    if not (step / MODEL_DIR / "config.json").exists():
        raise CheckpointError(
            f"{step} has no {MODEL_DIR}/config.json, as a training program writes it: load the weights into your model "
            "(holdfast.load_weights_only), and save that"
        )
    described, dtype = str(step / MODEL_DIR), published_dtype(request, reader.saved[names[0]].properties.dtype)
    model = meta_model(described)
    tensors = _cast(((name.removeprefix(_MODEL), reader.read(name)) for name in names), model, dtype)
    if (step / MODEL_DIR / NAMES_NAME).exists():  # files have other tensors than memory
        tensors = TensorLayout(model, names_in_files(described)).to_files(tensors)
    return _write_whole(request, tensors, dtype)
