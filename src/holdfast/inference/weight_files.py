"""Reads a directory of published weights or a LoRA adapter, and checks all of it before anything reaches the model.

Place in the flow: the trainer publishes a Hugging Face directory, and `/update_weights` names it. The engine's worker
reads it with `read_weights` and applies it only after `read_weights` returned. The digest is computed from the same
bytes that the tensors are made of.

With LoRA the trainer publishes only the adapter for engines. The worker adds the adapter to the weights of the engine's
model directory, with the same sums as the trainer. Then it swaps in the result like whole weights.

`DirectorySource` is the engine's side of the transport by directory; `holdfast.orchestrator.weight_sync` describes the
whole way.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from holdfast.errors import CheckpointError, DataError, nearest
from holdfast.run.manifest import MANIFEST_NAME, read_manifest, verify
from holdfast.run.weights import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    PEFT_PREFIX,
    WeightsFile,
    adapted_matrices,
    combined_digest,
    holds_adapter,
    read_base,
    read_scaling,
    scaling_of,
    tensors_digest,
    weights_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that were read and found to be whole and finite.

    Attributes:
        tensors: name -> tensor on the CPU, in the engine's dtype.
        digest: `holdfast.run.weights` of the bytes that were read.
    """

    tensors: dict[str, torch.Tensor]
    digest: str


class WeightSource(Protocol):
    """Where an engine gets the weights of a version from, while it goes on with those before."""

    def stage(self, location: str, version: int) -> CheckedWeights:
        """Return the weights of `version`, whole and checked. Called in a thread; touches no model.

        Args:
            location: `UpdateRequest.path`, as the orchestrator's side of the transport gave it.

        Raises:
            DataError: they cannot be used; says why.
            ReadError, OSError: they could not be read, and may be right.
        """
        ...


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


class BaseWeights:
    """The weights that adapters are added to: those of the engine's model directory, whatever is served now.

    The files are mapped into memory, so they take no more of it than the system has to spare.

    Attributes:
        directory: where they lie.
        digest: `holdfast.run.weights.tensors_digest` of them in float32.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        """Read all of them once.

        Raises:
            DataError: there are none, or not all that the architecture has.
        """
        self.directory = directory
        self.architecture = architecture
        files = weights_files(directory)
        if not files:
            raise DataError(
                f"{directory} holds no *.safetensors file, and an adapter is added to what lies there. "
                "Start the server with the model directory that the trainer has."
            )
        self.tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self.tensors |= load_file(file)
        if architecture.tied:
            self.tensors.pop(OUTPUT_LAYER, None)
        for name in architecture.ignored:  # the trainer has none of these
            self.tensors.pop(name, None)
        self.digest = tensors_digest(self._in_float32())

    def _in_float32(self) -> Iterator[tuple[str, tuple[int, ...], memoryview]]:
        for name, tensor in self.tensors.items():
            # In float32: the trainer digests its own in that, whatever dtype its files have.
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            yield name, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_adapter(
    directory: Path, base: BaseWeights, *, dtype: torch.dtype, version: int | None = None
) -> CheckedWeights:
    """Return the model that `base` and the adapter in `directory` make, checked as whole weights are.

    The digest is that of the adapter's file and of how often it counts.

    Raises:
        DataError: the adapter is damaged, or belongs to other weights.
    """
    tensors, digest = read_files(directory, base.architecture, version=version)
    if (directory / MANIFEST_NAME).exists():
        try:
            verify(directory)  # the settings beside the tensors
        except CheckpointError as error:
            raise DataError(str(error)) from None
    wanted = read_base(directory)
    if wanted.digest != base.digest:
        raise DataError(
            f"{directory} is an adapter for the weights of '{wanted.name}' (digest {wanted.digest}), and this server "
            f"has those of {base.directory} ({base.digest}). Start it with the weights that the trainer has."
        )
    adapted = _adapted(directory, tensors, base, renamed=wanted.renamed)
    # A copy: the next adapter is added to the same base.
    merged = dict(base.tensors) | adapted
    return CheckedWeights(
        tensors={name: checked(directory, name, tensor, base.architecture, dtype) for name, tensor in merged.items()},
        digest=digest,
    )


def _adapted(
    directory: Path, tensors: dict[str, torch.Tensor], base: BaseWeights, *, renamed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the matrices that the factors in `tensors` change, in float32, by their names in `base`.

    Args:
        renamed: names in `base` of matrices that the adapter calls otherwise.

    Shape legend: O outputs and I inputs of a linear layer, R rank.
    """
    scaling = read_scaling(directory)
    factors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    matrices = adapted_matrices(factors)
    if not matrices:
        raise DataError(f"{directory} adapts nothing: {ADAPTER_NAME} holds no factors")
    known = {name for pair in matrices.values() for name in pair}
    if surplus := sorted(factors.keys() - known):
        raise DataError(f"{directory}: tensor '{surplus[0]}' is no factor of an adapter")
    adapted = {}
    for matrix, names in matrices.items():
        if missing := [name for name in names if name not in factors]:
            raise DataError(f"{directory}: tensor '{missing[0]}' is missing")
        matrix = renamed.get(matrix, matrix)
        if matrix not in base.tensors:
            raise DataError(f"{directory}: '{matrix}', which it adapts, is not part of the model")
        weight_OI, a_RI, b_OR = base.tensors[matrix], factors[names.a], factors[names.b]
        _check_factors(directory, matrix, a_RI, b_OR, outputs_and_inputs=tuple(weight_OI.shape), rank=scaling.r)
        # The same sums as `holdfast.trainer.model.lora.merged`, for the same bits.
        adapted[matrix] = weight_OI.float() + (b_OR.float() @ a_RI.float()) * scaling.scale
    return adapted


def _check_factors(
    directory: Path,
    matrix: str,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    *,
    outputs_and_inputs: tuple[int, ...],
    rank: int,
) -> None:
    for factor in (a_RI, b_OR):
        if not factor.dtype.is_floating_point:
            raise DataError(f"{directory}: a factor of '{matrix}' has dtype {factor.dtype}, which is no float")
    shapes = tuple(a_RI.shape), tuple(b_OR.shape)
    if len(outputs_and_inputs) != 2 or shapes != ((rank, outputs_and_inputs[1]), (outputs_and_inputs[0], rank)):
        raise DataError(
            f"{directory}: the factors of '{matrix}' have the shapes {list(a_RI.shape)} and {list(b_OR.shape)}, which "
            f"do not fit {list(outputs_and_inputs)} and the rank r = {rank} of {ADAPTER_CONFIG_NAME}"
        )


class DirectorySource:
    """Reads published directories; implements `WeightSource`.

    Args:
        model_dir: of the engine's model, which says what weights consist of, and which adapters are added to.
        dtype: of the engine.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._architecture: Architecture | None = None
        self._base: BaseWeights | None = None

    def stage(self, location: str, version: int) -> CheckedWeights:
        """Return the weights in the directory `location`; what of the model is needed for it is read at the first call.

        Raises:
            DataError: it does not hold whole weights of `version`, or an adapter to other weights.
            OSError: it could not be read.
        """
        directory = Path(location)
        if self._architecture is None:
            self._architecture = read_architecture(self._model_dir)
        if not holds_adapter(directory):
            return read_weights(directory, self._architecture, dtype=self._dtype, version=version)
        if self._base is None:
            self._base = BaseWeights(self._model_dir, self._architecture)
        return read_adapter(directory, self._base, dtype=self._dtype, version=version)
