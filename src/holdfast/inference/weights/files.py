"""Reading a directory of weights, whole and checked, before any of it comes near the model.

Place in the flow: the trainer publishes a Hugging Face directory, `/update_weights` names it, the
engine's worker reads it with `read_weights` and applies it only when that returned. The digest is
taken from the very bytes that the tensors are made of.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from holdfast.inference.weights.transport import CheckedWeights
from holdfast.shared.errors import CheckpointError, DataError, nearest
from holdfast.shared.files.manifest import MANIFEST_NAME, read_manifest
from holdfast.shared.files.weights_digest import WeightsFile, combined_digest, scaling_of, weights_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A tied output layer has no weights of its own; writers may leave it out or repeat the embedding.
OUTPUT_LAYER = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_ACCEPTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INDEX_NAME = "model.safetensors.index.json"
_MOST_FILES = 10_000
# Manifest, index and settings.
_SETTINGS_BYTES = 1 << 26
# Of float64, which is more than any that is accepted; and what stands around the tensors.
_BYTES_PER_PARAMETER = 8
_BESIDE_BYTES = 1 << 26
_HEADER_BYTES = 1 << 20
_HEADER_BYTES_PER_TENSOR = 1024
_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket"}


@dataclass(frozen=True)
class Architecture:
    """Which tensors the weights of a model consist of.

    Attributes:
        shapes: name -> shape, without the output layer if that is tied.
        tied: the output layer is the embedding.
        model_dir: of the model; None where there is none, as in tests.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool
    model_dir: Path | None = field(default=None, compare=False)

    @cached_property
    def most_bytes(self) -> int:
        """How large all files of a directory of such weights can be together."""
        return _BESIDE_BYTES + _BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def most_header_bytes(self) -> int:
        """How long the header of one file can be."""
        return _HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * len(self.shapes)

    @cached_property
    def ignored(self) -> frozenset[str]:
        """Names of tensors that files may have and transformers leaves out: the trainer never publishes them.

        Layers that predict several tokens ahead, and buffers that old versions wrote, are such.
        """
        return frozenset() if self.model_dir is None else _ignored(self.model_dir, self.shapes.keys())


def read_architecture(model_dir: Path) -> Architecture:
    """Return the tensors that weights for the model in `model_dir` must consist of.

    Taken from the headers of the weights there; a directory with a config.json only is asked
    through transformers, which builds the model without memory.
    """
    tied = bool(json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings", False))
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weights_files(model_dir):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
    if not shapes:
        shapes = _shapes_in_files(_meta_model(model_dir))
    if tied:
        shapes.pop(OUTPUT_LAYER, None)
    return Architecture(shapes=shapes, tied=tied, model_dir=model_dir)


def _meta_model(model_dir: Path) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    # Without the dtype of the config, which transformers would make that of all threads: an engine may go on meanwhile.
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=None)


def _shapes_in_files(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors by the names that save_pretrained, and so the trainer, gives them."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tuple(one.shape) for name, one in revert_weight_conversion(model, model.state_dict()).items()}


def _ignored(model_dir: Path, names: Iterable[str]) -> frozenset[str]:
    try:
        model = _meta_model(model_dir)
    except (ValueError, KeyError):  # no causal language model of transformers: then it leaves out nothing
        return frozenset()
    own, prefix = _shapes_in_files(model).keys(), f"{model.base_model_prefix}."
    # Files of base models have names without the prefix.
    others = {name for name in names if not own & {name, prefix + name, name.removeprefix(prefix)}}
    findings: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(others))
    model._adjust_missing_and_unexpected_keys(findings)
    return frozenset(others - findings.unexpected_keys)


def read_weights(
    directory: Path, architecture: Architecture, *, dtype: torch.dtype, version: int | None = None
) -> CheckedWeights:
    """Read all weights in `directory` and check them: completeness, shapes, dtypes, finiteness.

    Where the directory has a manifest, sizes and checksums must match it, and so must `version`
    unless that is None.

    Raises:
        DataError: naming the file or tensor at fault, and what was expected.
    """
    tensors, digest = read_files(directory, architecture, version=version)
    _check_names(directory, tensors, architecture)
    tensors = {
        name: checked(directory, name, tensor, architecture, dtype)
        for name, tensor in tensors.items()
        if tensor.dtype in _ACCEPTED_DTYPES or name not in architecture.ignored
    }
    if architecture.tied and (repeated := tensors.pop(OUTPUT_LAYER, None)) is not None:
        embedding = tensors.get(EMBEDDING)
        if embedding is not None and not torch.equal(repeated, embedding):
            raise DataError(
                f"{directory}: '{OUTPUT_LAYER}' differs from '{EMBEDDING}', but the model's config ties them"
            )
    return CheckedWeights(tensors=tensors, digest=digest)


def read_files(
    directory: Path, architecture: Architecture, *, version: int | None = None
) -> tuple[dict[str, torch.Tensor], str]:
    """Return all tensors in `directory` by name, and the digest of the very bytes that they are made of.

    Raises:
        DataError: a file is missing, damaged, not of `version`, or larger than weights of `architecture` can be.
    """
    require_regular(directory, most_bytes=architecture.most_bytes)
    paths = _complete_files(directory)
    expected = _manifest_entries(directory, version)
    for name in expected or ():
        if name.endswith(".safetensors") and "/" not in name and directory / name not in paths:
            raise DataError(f"{directory}: file '{name}', which {MANIFEST_NAME} names, is missing")
    tensors: dict[str, torch.Tensor] = {}
    files: list[WeightsFile] = []
    for path in paths:
        if expected is not None:
            _check_size(path, path.stat().st_size, expected)
        # Read once: digest and tensors are of the same bytes, whatever becomes of the file.
        content = path.read_bytes()
        file = WeightsFile(path.name, len(content), xxhash.xxh3_128_hexdigest(content))
        if expected is not None:
            _check_file(path, file, expected)
        # safetensors begins with the length of its header, which is parsed before any tensor is looked at.
        header_bytes = int.from_bytes(content[:8], "little")
        if header_bytes > architecture.most_header_bytes:
            raise DataError(
                f"{path} is not a whole safetensors file of this model: a header of {header_bytes} bytes, allowed are "
                f"{architecture.most_header_bytes} for {len(architecture.shapes)} tensors"
            )
        try:
            loaded = safetensors.torch.load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise DataError(f"{path} is not a whole safetensors file: {error}") from None
        if twice := sorted(loaded.keys() & tensors.keys()):
            raise DataError(f"{path}: tensor '{twice[0]}' is also in another file of {directory}")
        tensors.update(loaded)
        files.append(file)
    return tensors, combined_digest(files + scaling_of(directory, [file.name for file in files]))


def require_regular(directory: Path, *, most_bytes: int) -> None:
    """Refuse pipes and devices under names that are read, and more than weights can be, before anything is opened.

    Whoever opens a pipe waits for its writer, and a device may have no end.

    Raises:
        DataError: naming what is there, and what is allowed.
    """
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory")
    total = 0
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries, start=1):
            if number > _MOST_FILES:
                raise DataError(f"{directory} holds more than {_MOST_FILES} files: it is no directory of weights")
            if not entry.name.endswith((".safetensors", ".json")):
                continue
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device")
                raise DataError(f"{entry.path} is no regular file, but a {kind}")
            if entry.name.endswith(".safetensors"):
                total += status.st_size
            elif status.st_size > _SETTINGS_BYTES:
                raise DataError(f"{entry.path} has {status.st_size} bytes, allowed are {_SETTINGS_BYTES}")
    if total > most_bytes:
        raise DataError(f"{directory} holds {total} bytes of weights, this model can have {most_bytes} at most")


def _manifest_entries(directory: Path, version: int | None) -> dict[str, WeightsFile] | None:
    if not (directory / MANIFEST_NAME).exists():
        return None
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        raise DataError(str(error)) from None
    # None: what the engine starts with has no version of the run.
    if version is not None and manifest.kind == "weights" and manifest.policy_version != version:
        raise DataError(
            f"{directory} holds policy version {manifest.policy_version} by its {MANIFEST_NAME}, "
            f"but was pushed as version {version}"
        )
    return {name: WeightsFile(name, entry.size_bytes, entry.xxh3_128) for name, entry in manifest.files.items()}


def _complete_files(directory: Path) -> list[Path]:
    """Return the weights files; an index file, if there is one, must name the same files."""
    paths = weights_files(directory)
    if not paths:
        raise DataError(f"{directory} holds no *.safetensors file")
    index = directory / _INDEX_NAME
    if index.exists():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{index} cannot be read: {error}") from None
        if strange := [name for name in named if not isinstance(name, str)]:
            raise DataError(f"{index} names {strange[0]!r:.80} as a file")
        if missing := sorted(named - {path.name for path in paths}):
            raise DataError(f"{directory}: file '{missing[0]}', which {_INDEX_NAME} names, is missing")
    return paths


def _check_size(path: Path, size_bytes: int, expected: dict[str, WeightsFile]) -> None:
    listed = expected.get(path.name)
    if listed is None:
        raise DataError(f"{path} is not in the {MANIFEST_NAME} beside it")
    if listed.size_bytes != size_bytes:
        raise DataError(f"{path} is damaged: {size_bytes} bytes, {MANIFEST_NAME} says {listed.size_bytes}")


def _check_file(path: Path, found: WeightsFile, expected: dict[str, WeightsFile]) -> None:
    _check_size(path, found.size_bytes, expected)
    listed = expected[path.name]
    if listed.xxh3_128 != found.xxh3_128:
        raise DataError(f"{path} is damaged: checksum {found.xxh3_128}, {MANIFEST_NAME} says {listed.xxh3_128}")


def _check_names(directory: Path, tensors: Mapping[str, torch.Tensor], architecture: Architecture) -> None:
    allowed = set(architecture.shapes) | ({OUTPUT_LAYER} if architecture.tied else set())
    missing = sorted(architecture.shapes.keys() - tensors.keys())
    if missing and (missing := [name for name in missing if name not in architecture.ignored]):
        raise DataError(
            f"{directory}: tensor '{missing[0]}' is missing ({len(missing)} of {len(architecture.shapes)} are)"
        )
    if unknown := sorted(tensors.keys() - allowed):
        raise DataError(f"{directory}: tensor '{unknown[0]}' is not part of the model.{nearest(unknown[0], allowed)}")


def checked(
    directory: Path, name: str, tensor: torch.Tensor, architecture: Architecture, dtype: torch.dtype
) -> torch.Tensor:
    """Return `tensor` in `dtype` after checking it.

    float32 weights in a bfloat16 engine, and the reverse, are a choice of the configuration;
    integers and 8-bit floats are not weights of this model.
    """
    shape = architecture.shapes.get(EMBEDDING if name == OUTPUT_LAYER and architecture.tied else name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise DataError(f"{directory}: tensor '{name}' has shape {list(tensor.shape)}, the model needs {list(shape)}")
    if tensor.dtype not in _ACCEPTED_DTYPES:
        allowed = ", ".join(str(accepted).removeprefix("torch.") for accepted in _ACCEPTED_DTYPES)
        raise DataError(
            f"{directory}: tensor '{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}, allowed: {allowed}"
        )
    tensor = tensor.to(dtype)
    # After the cast: float16 and bfloat16 may overflow where float32 did not.
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{directory}: tensor '{name}' holds NaN or infinity")
    return tensor
