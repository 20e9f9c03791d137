"""Reads a directory of published weights or a LoRA adapter, and checks all of it before anything reaches the model.

The trainer publishes a Hugging Face directory, and `/update_weights` names the directory. The engine's worker reads it
by `DirectorySource.stage`, and swaps in the weights afterwards: see `holdfast.orchestrator.weight_sync`. The digest is
computed from the same bytes as the tensors.

With LoRA the trainer publishes only the adapter for engines. The worker adds the adapter to the weights of the engine's
model directory, with the same sums as the trainer.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from holdfast.errors import CheckpointError, DataError, nearest
from holdfast.protocol import transfer
from holdfast.run import weights
from holdfast.run.manifest import MANIFEST_NAME, read_manifest, verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class CheckedWeights:
    """Whole and finite weights: name -> tensor on the CPU as `checked` returns it, and the digest of the bytes."""

    tensors: dict[str, torch.Tensor]
    digest: str


# Files of a model with tied embeddings may leave out the output layer, or repeat the embedding.
OUTPUT_LAYER = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The accepted dtypes by their names in safetensors files."""

_ACCEPTED_DTYPES = tuple(FLOATS.values())
_MOST_FILES = 10_000
_SETTINGS_BYTES = 1 << 26  # of manifest, index and settings
_BYTES_PER_PARAMETER = 8  # of float64, which is larger than all accepted dtypes
_BESIDE_BYTES = 1 << 26
_HEADER_BYTES = 1 << 20
_HEADER_BYTES_PER_TENSOR = 1024
_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket"}


@dataclass(frozen=True)
class Architecture:
    """Which tensors the weights of a model consist of.

    Attributes:
        shapes: name -> shape, without a tied output layer.
        tied: whether the output layer is the embedding.
        model_dir: of the model; None in tests.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool
    model_dir: Path | None = field(default=None, compare=False)

    @cached_property
    def most_bytes(self) -> int:
        """How large all files of such weights can be together."""
        return _BESIDE_BYTES + _BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def most_header_bytes(self) -> int:
        """How long the header of one file can be."""
        return _HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * len(self.shapes)

    @cached_property
    def ignored(self) -> frozenset[str]:
        """Names of tensors in files that transformers leaves out, such as layers that predict several tokens ahead.

        The trainer never publishes them."""
        return frozenset() if self.model_dir is None else _ignored(self.model_dir, self.shapes.keys())


def read_architecture(model_dir: Path) -> Architecture:
    """Return which tensors the weights of the model in `model_dir` consist of.

    The headers of its weights name them; without weights, transformers builds the model of its config.json on the meta
    device."""
    tied = bool(json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False))
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weights.weights_files(model_dir):
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

    # transformers would make the config's dtype the default of all threads, and the engine computes meanwhile.
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=None)


def _shapes_in_files(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors by the names that `save_pretrained` and the trainer write."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tuple(one.shape) for name, one in revert_weight_conversion(model, model.state_dict()).items()}


def _ignored(model_dir: Path, names: Iterable[str]) -> frozenset[str]:
    try:
        model = _meta_model(model_dir)
    except (ValueError, KeyError):  # not a causal language model of transformers
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

    Sizes, checksums and `version`, unless that is None, must match the manifest, if there is one. Raise DataError that
    names the file or tensor at fault, and what was expected."""
    tensors, digest = read_files(directory, architecture, version=version)
    check_names(directory, tensors, architecture)
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
    """Return all tensors in `directory` by name, and the digest of their bytes. Raise DataError if they are damaged."""
    require_regular(directory, most_bytes=architecture.most_bytes)
    paths = weights.weights_files(directory)
    if not paths:
        raise DataError(f"{directory} holds no *.safetensors file")
    expected = _manifest_entries(directory, version)
    for name in expected or ():
        if name.endswith(".safetensors") and "/" not in name and directory / name not in paths:
            raise DataError(f"{directory}: file '{name}', which {MANIFEST_NAME} names, is missing")
    tensors: dict[str, torch.Tensor] = {}
    files: list[weights.WeightsFile] = []
    for path in paths:
        listed = None if expected is None else _listed(path, expected)
        # Read once: digest and tensors are of the same bytes, even if the file changes.
        content = _content(path)
        file = weights.WeightsFile(path.name, len(content), xxhash.xxh3_128_hexdigest(content.data))
        if listed is not None and file.xxh3_128 != listed.xxh3_128:
            raise DataError(f"{path} is damaged: checksum {file.xxh3_128}, {MANIFEST_NAME} says {listed.xxh3_128}")
        # The first 8 bytes are the length of the header, which safetensors parses before all else.
        header_bytes = int.from_bytes(content[:8].tobytes(), "little")
        if header_bytes > architecture.most_header_bytes:
            raise DataError(
                f"{path} is not a whole safetensors file of this model: a header of {header_bytes} bytes, allowed are "
                f"{architecture.most_header_bytes} for {len(architecture.shapes)} tensors"
            )
        try:
            loaded = _views(content, header_bytes)
            if loaded is None:
                loaded = safetensors.torch.load(content.tobytes())
        except (SafetensorError, ValueError, KeyError) as error:
            raise DataError(f"{path} is not a whole safetensors file: {error}") from None
        if twice := sorted(loaded.keys() & tensors.keys()):
            raise DataError(f"{path}: tensor '{twice[0]}' is also in another file of {directory}")
        tensors.update(loaded)
        files.append(file)
    return tensors, weights.combined_digest(files + weights.scaling_of(directory, [file.name for file in files]))


def _content(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        content = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
        return content[: file.readinto(content.data)]


def _views(content: np.ndarray, header_bytes: int) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a file without a copy; None: let safetensors read it, or say what is wrong with it."""
    begin = 8 + header_bytes
    try:
        header = content[8:begin].tobytes().decode()
        entries = transfer.entries_of(transfer.PlannedFile("", header))
        is_whole = not entries or begin + entries[-1].end == len(content)
        sizes = [size for entry in entries for size in entry.shape]
        is_plain = "__metadata__" not in header or '"__metadata__":{"format":"pt"}' in header
        if not is_plain or not all(type(size) is int and size >= 0 for size in sizes):
            return None
        if begin % 8 or not is_whole or any(entry.dtype not in FLOATS for entry in entries):
            return None
        data = torch.from_numpy(content)[begin:]
        return {one.name: data[one.begin : one.end].view(FLOATS[one.dtype]).view(one.shape) for one in entries}
    except (ValueError, RuntimeError, TypeError):
        return None


def require_regular(directory: Path, *, most_bytes: int) -> None:
    """Refuse pipes, which block, devices, which have no end, and files larger than weights can be."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory")
    total = 0
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries, start=1):
            if number > _MOST_FILES:
                raise DataError(f"{directory} holds more than {_MOST_FILES} files: it is not a directory of weights")
            if not entry.name.endswith((".safetensors", ".json")):
                continue
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device")
                raise DataError(f"{entry.path} is a {kind}, not a regular file")
            if entry.name.endswith(".safetensors"):
                total += status.st_size
            elif status.st_size > _SETTINGS_BYTES:
                raise DataError(f"{entry.path} has {status.st_size} bytes, allowed are {_SETTINGS_BYTES}")
    if total > most_bytes:
        raise DataError(f"{directory} holds {total} bytes of weights, this model can have {most_bytes} at most")


def _manifest_entries(directory: Path, version: int | None) -> dict[str, weights.WeightsFile] | None:
    if not (directory / MANIFEST_NAME).exists():
        return None
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        raise DataError(str(error)) from None
    if version is not None and manifest.kind == "weights" and manifest.policy_version != version:
        raise DataError(
            f"{directory} holds policy version {manifest.policy_version} by its {MANIFEST_NAME}, "
            f"but was pushed as version {version}"
        )
    return {name: weights.WeightsFile(name, entry.size_bytes, entry.xxh3_128) for name, entry in manifest.files.items()}


def _listed(path: Path, expected: dict[str, weights.WeightsFile]) -> weights.WeightsFile:
    """Return the manifest's entry of a file, after comparing its size."""
    listed, size_bytes = expected.get(path.name), path.stat().st_size
    if listed is None:
        raise DataError(f"{path} is not in the {MANIFEST_NAME} beside it")
    if listed.size_bytes != size_bytes:
        raise DataError(f"{path} is damaged: {size_bytes} bytes, {MANIFEST_NAME} says {listed.size_bytes}")
    return listed


def check_names(directory: Path | str, tensors: Mapping[str, torch.Tensor], architecture: Architecture) -> None:
    """Raise DataError if a tensor is missing or unknown; `directory` is the place that errors name."""
    allowed = set(architecture.shapes) | ({OUTPUT_LAYER} if architecture.tied else set())
    missing = sorted(architecture.shapes.keys() - tensors.keys())
    if missing and (missing := [name for name in missing if name not in architecture.ignored]):
        raise DataError(
            f"{directory}: tensor '{missing[0]}' is missing ({len(missing)} of {len(architecture.shapes)} are)"
        )
    if unknown := sorted(tensors.keys() - allowed):
        raise DataError(f"{directory}: tensor '{unknown[0]}' is not part of the model.{nearest(unknown[0], allowed)}")


def check_fit(directory: Path | str, name: str, tensor: torch.Tensor, architecture: Architecture) -> None:
    """Raise DataError if a tensor has another shape or dtype than the model takes."""
    shape = architecture.shapes.get(EMBEDDING if name == OUTPUT_LAYER and architecture.tied else name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise DataError(f"{directory}: tensor '{name}' has shape {list(tensor.shape)}, the model needs {list(shape)}")
    if tensor.dtype not in _ACCEPTED_DTYPES:
        allowed = ", ".join(str(accepted).removeprefix("torch.") for accepted in _ACCEPTED_DTYPES)
        raise DataError(
            f"{directory}: tensor '{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}, allowed: {allowed}"
        )


def checked(
    directory: Path | str, name: str, tensor: torch.Tensor, architecture: Architecture, dtype: torch.dtype
) -> torch.Tensor:
    """Return `tensor` in `dtype` after checking shape, dtype and finiteness; a vector in the dtype of the file.

    The engine casts vectors itself, and holds some in float32, such as the correction bias of experts."""
    check_fit(directory, name, tensor, architecture)
    # A vector of another dtype as a copy: it would hold the whole file in memory, of which matrices are copies.
    tensor = tensor.to(dtype if tensor.ndim > 1 else tensor.dtype, copy=tensor.dtype != dtype)
    # After a cast: float16 and bfloat16 may overflow where float32 did not.
    # `isfinite` of every element takes 20 times as long; NaN is both the least and the largest.
    if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor)).to(dtype)).all()):
        raise DataError(f"{directory}: tensor '{name}' holds NaN or infinity")
    return tensor


class BaseWeights:
    """The weights of the engine's model directory, which adapters are added to. The files are mapped into memory.

    Attributes:
        digest: `holdfast.run.weights.tensors_digest` of the weights in float32.

    Raise DataError if there are no weights.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.directory = directory
        self.architecture = architecture
        files = weights.weights_files(directory)
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
        for name in architecture.ignored:
            self.tensors.pop(name, None)
        self._files, self._written = files, [_written(file) for file in files]
        self.digest = weights.tensors_digest(self._in_float32())

    def check(self) -> None:
        """Compute the digest again if somebody has written to a file since: the mapped memory then holds that."""
        written = [_written(file) for file in self._files]
        if written != self._written:
            self._written, self.digest = written, weights.tensors_digest(self._in_float32())

    def _in_float32(self) -> Iterator[tuple[str, tuple[int, ...], memoryview]]:
        for name, tensor in self.tensors.items():
            # The trainer digests its weights in float32, too.
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            yield name, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _written(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:  # what is mapped stays
        return None
    return status.st_size, status.st_mtime_ns


def read_adapter(
    directory: Path, base: BaseWeights, *, dtype: torch.dtype, version: int | None = None
) -> CheckedWeights:
    """Return the weights that `base` and an adapter make, and the adapter's digest. Raise DataError if damaged."""
    tensors, digest = read_files(directory, base.architecture, version=version)
    if (directory / MANIFEST_NAME).exists():
        try:
            verify(directory)  # the settings beside the tensors
        except CheckpointError as error:
            raise DataError(str(error)) from None
    wanted = weights.read_base(directory)
    base.check()
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
    """Return the matrices that the factors in `tensors` change, in float32, by their names in `base`. `renamed`: name
    in the adapter -> name in `base`, if they differ. Shape legend: O outputs and I inputs of a linear layer, R rank."""
    scaling = weights.read_scaling(directory)
    factors = {name.removeprefix(weights.PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    matrices = weights.adapted_matrices(factors)
    if not matrices:
        raise DataError(f"{directory} adapts nothing: {weights.ADAPTER_NAME} holds no factors")
    known = {name for pair in matrices.values() for name in pair}
    if surplus := sorted(factors.keys() - known):
        raise DataError(f"{directory}: tensor '{surplus[0]}' is not a factor of an adapter")
    adapted = {}
    for matrix, names in matrices.items():
        if missing := [name for name in names if name not in factors]:
            raise DataError(f"{directory}: tensor '{missing[0]}' is missing")
        matrix = renamed.get(matrix, matrix)
        if matrix not in base.tensors:
            raise DataError(f"{directory}: '{matrix}', which it adapts, is not part of the model")
        weight_OI, a_RI, b_OR = base.tensors[matrix], factors[names.a], factors[names.b]
        if not (a_RI.dtype.is_floating_point and b_OR.dtype.is_floating_point):
            raise DataError(f"{directory}: a factor of '{matrix}' has dtype {a_RI.dtype} or {b_OR.dtype}: not a float")
        shapes = list(a_RI.shape), list(b_OR.shape)
        outputs, inputs = weight_OI.shape if weight_OI.ndim == 2 else (0, 0)
        if shapes != ([scaling.r, inputs], [outputs, scaling.r]):
            raise DataError(
                f"{directory}: the factors of '{matrix}' have the shapes {shapes[0]} and {shapes[1]}, which do not fit "
                f"{list(weight_OI.shape)} and the rank r = {scaling.r} of {weights.ADAPTER_CONFIG_NAME}"
            )
        # The same sums as `holdfast.trainer.model.lora.merged`, for the same bits.
        adapted[matrix] = weight_OI.float() + (b_OR.float() @ a_RI.float()) * scaling.scale
    return adapted


class DirectorySource:
    """Reads published weights in the engine's dtype; `model_dir` has the base of adapters."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._base: BaseWeights | None = None

    @cached_property
    def architecture(self) -> Architecture:
        """Which tensors the model consists of."""
        return read_architecture(self._model_dir)

    def stage(self, location: str, version: int) -> CheckedWeights:
        """Return the weights in the directory `location`. Called in a thread; the model itself is only read. Raise
        DataError if there are no whole weights of `version`, or an adapter of other weights; ReadError or OSError if
        the files could not be read, and may be right."""
        directory = Path(location)
        if not weights.holds_adapter(directory):
            return read_weights(directory, self.architecture, dtype=self._dtype, version=version)
        if self._base is None:
            self._base = BaseWeights(self._model_dir, self.architecture)
        return read_adapter(directory, self._base, dtype=self._dtype, version=version)
