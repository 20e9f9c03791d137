"""Init from weights: fills a model with the weights of a file or directory.

    step_100/ (a checkpoint)        torch.distributed.checkpoint below trainer/, names `model.*`; verified
    a torch.distributed.checkpoint  the model's names, perhaps all with one prefix such as `app.model.`
    a LoRA adapter                  of holdfast or peft, for a model with adapters
    weights/step_100, a Hugging     *.safetensors, with an index if there are several;
    Face directory                  published weights are verified
    one file                        .safetensors

Every rank reads only its own part, into tensors that may be sharded. No code of the source runs. Optimizer and counters
stay as they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.errors import CheckpointError
from holdfast.run import manifest
from holdfast.run.checkpoints import TRAINER_DIR, Kind, require_weights, verify_checkpoint
from holdfast.run.manifest import MANIFEST_NAME, Verification
from holdfast.run.weights import PEFT_PREFIX, adapted_matrices
from holdfast.trainer.checkpoint.dcp import IndexReader, read_tensors, some
from holdfast.trainer.mesh import RankGroup

_log = logging.getLogger("trainer")

Region = tuple[slice, ...]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# Prefixes of the model's names in files of other programs.
_PREFIXES = ("", "model.", "app.model.", "module.", PEFT_PREFIX)
# Tensors that are cast are read into buffers of at most this many bytes together.
_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class Found:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A place that tensors are read from."""

    found: dict[str, Found]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, by their names in the source; dtypes may differ. Collective."""
        ...


def local_part(tensor: Tensor) -> tuple[Tensor, Region]:
    """Return this rank's part of a tensor, and its region in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def open_source(path: Path, kind: Kind) -> Source:
    """Return the source at `path`; no tensor is read yet. Raise CheckpointError if it cannot be read."""
    if kind is Kind.CHECKPOINT:
        return DcpSource(path / TRAINER_DIR)
    if kind is Kind.DCP:
        return DcpSource(path)
    adapter = path / "adapter_model.safetensors"  # merged weights may be beside it
    if kind is Kind.ADAPTER and adapter.is_file():
        return SafetensorsSource([adapter])
    return SafetensorsSource([path] if kind is Kind.TENSORS else _files_of(path))


def _files_of(directory: Path) -> list[Path]:
    """Return the weights files of a Hugging Face directory: the files of its index, or all."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_FileIndex).weight_map.values())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from None
        return [directory / name for name in sorted(names)]
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


class _FileIndex(msgspec.Struct):
    weight_map: dict[str, str]


class DcpSource:
    """A torch.distributed.checkpoint directory. Other objects than tensors are never unpickled."""

    def __init__(self, directory: Path) -> None:
        self._index = IndexReader(directory)
        saved = self._index.tensors()
        self.found = {name: Found(tuple(entry.size), entry.properties.dtype) for name, entry in saved.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        self._read({name: target for name, target in targets.items() if self.found[name].dtype == target.dtype})
        group: dict[str, Tensor] = {}
        group_bytes = 0
        others = [name for name, target in targets.items() if self.found[name].dtype != target.dtype]
        for number, name in enumerate(others, start=1):
            group[name] = torch.empty_like(targets[name], dtype=self.found[name].dtype)
            group_bytes += group[name].nbytes
            if group_bytes >= _BUFFER_BYTES or number == len(others):
                self._read(group)
                for done, buffer in group.items():
                    local_part(targets[done])[0].copy_(local_part(buffer)[0])
                group, group_bytes = {}, 0

    def _read(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            read_tensors(tensors, self._index)


class SafetensorsSource:
    """Safetensors files; each rank reads its part of every tensor."""

    def __init__(self, files: list[Path]) -> None:
        self.found: dict[str, Found] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            with _readable(file), safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - not a mapping
                    entry = content.get_slice(name)
                    if entry.get_dtype() not in _DTYPES:
                        raise CheckpointError(f"{file}: {name} has the dtype {entry.get_dtype()}, which is not known")
                    self.found[name] = Found(tuple(entry.get_shape()), _DTYPES[entry.get_dtype()])
                    self._file_of[name] = file

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        for file in dict.fromkeys(self._file_of[name] for name in targets):
            with _readable(file), safe_open(file, framework="pt") as content:
                for name, target in targets.items():
                    local, region = local_part(target)
                    # Some ranks hold nothing of a tensor with fewer rows than ranks.
                    if self._file_of[name] == file and local.numel():
                        whole = content.get_slice(name) if region else content.get_tensor(name)
                        local.copy_(whole[region] if region else whole)


class FileLayout(Protocol):
    """Converts the tensors of a model's files into the tensors in memory; `TensorLayout` does for transformers."""

    def name_in_memory(self, name: str) -> str | None:
        """Return the name in memory of a tensor in files; None if memory has no tensor of the same layout."""
        ...

    def sources(self, file_names: Iterable[str]) -> dict[str, list[str]]:
        """Group tensors of files by the first tensor in memory that they become, or their own name."""
        ...

    def from_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert whole groups of `sources` into tensors of memory."""
        ...


class ConvertedSource:
    """The tensors of a model, from a source with the tensors of the model's files; see `FileLayout`.

    Each rank reads its part of a tensor that only has another name, and the whole of joined or split tensors, one group
    after another."""

    def __init__(self, source: Source, layout: FileLayout) -> None:
        self._source = source
        self._layout = layout
        self._groups: list[list[str]] = []
        self._group_of: dict[str, int] = {}
        self.found: dict[str, Found] = {}
        for names in layout.sources(source.found).values():
            try:
                made = layout.from_files({name: self._empty(name, device="meta") for name in names})
            except (RuntimeError, ValueError, LookupError) as error:
                raise CheckpointError(
                    f"{names[0]} and {len(names) - 1} other tensors do not make one of this model's: {error}"
                ) from None
            self.found |= {name: Found(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
            self._group_of |= dict.fromkeys(made, len(self._groups))
            self._groups.append(names)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        groups = {name: self._groups[self._group_of[name]] for name in targets}
        renamed = {name: group[0] for name, group in groups.items() if self._layout.name_in_memory(group[0]) == name}
        self._source.fill({there: targets[name] for name, there in renamed.items()})
        for group in dict.fromkeys(self._group_of[name] for name in targets if name not in renamed):
            pieces = {name: self._empty(name, device="cpu") for name in self._groups[group]}
            self._source.fill(pieces)
            for name, tensor in self._layout.from_files(pieces).items():
                if name in targets:
                    local, region = local_part(targets[name])
                    local.copy_(tensor[region])

    def _empty(self, name: str, *, device: str) -> Tensor:
        found = self._source.found[name]
        return torch.empty(found.shape, dtype=found.dtype, device=device)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise one error that names the file, if it is damaged or missing."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{file} cannot be read: {reason}") from error


# Buffers in older Hugging Face files, which the config determines.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")
_OPTIMIZER = re.compile(r"(optim(izers?)?|train_state)\.")  # and torchtitan's counters
# Output and input embeddings, by the ends of their names.
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def load_weights_only(
    tensors: Mapping[str, Tensor], path: str | Path, *, how: Verification = "full", layout: FileLayout | None = None
) -> set[tuple[torch.dtype, torch.dtype]]:
    """Fill `tensors` in place with the weights at `path`. Collective. Raise CheckpointError if there are no weights,
    they are damaged, or they do not fit the model (missing, surplus or differently shaped tensors).

    Checkpoints and published weights are verified first. Other dtypes are cast, with a line in the log. If input and
    output embeddings are one tensor, the file may have either name, or both names with equal values.

    Args:
        tensors: the model's tensors by their Hugging Face names, plain or sharded over all ranks.
        path: a checkpoint, a torch.distributed.checkpoint directory, a Hugging Face directory, or one file.
        how: `full` checks every byte of checkpoints and published weights, `size` only sizes.
        layout: of files, if their tensors differ from the tensors in memory.

    Returns:
        Pairs of a dtype there and here.
    """
    path = Path(path)
    kind = require_weights(path)
    with RankGroup() as ranks:  # rank 0 reads every byte
        ranks.on_main(lambda: _verify(path, kind, how), error=CheckpointError)
    source = open_source(path, kind)
    prefixes = ("model.",) if kind is Kind.CHECKPOINT else _PREFIXES
    dtypes = fill_weights(
        tensors, source, f"{path} ({kind})", prefixes, layout=None if kind is Kind.CHECKPOINT else layout
    )
    for there, here in sorted(dtypes, key=str):
        if there != here:
            _log.info("%s: weights are cast from %s to %s", path, there, here)
    _log.info("took the weights of %s, %d tensors; optimizer and counters start at 0", path, len(tensors))
    return dtypes


def fill_weights(
    tensors: Mapping[str, Tensor],
    source: Source,
    what: str,
    prefixes: tuple[str, ...] = _PREFIXES,
    *,
    layout: FileLayout | None = None,
) -> set[tuple[torch.dtype, torch.dtype]]:
    """Fill `tensors` from an open source; errors begin with `what`. The rest is as in `load_weights_only`."""
    is_as_in_memory = any(all(f"{prefix}{name}" in source.found for name in tensors) for prefix in prefixes)
    if layout is not None and not is_as_in_memory and not adapted_matrices(tensors):
        source = ConvertedSource(source, layout)
    names = _match(tensors, source, prefixes, what)
    source.fill({name: tensors[own] for own, name in names.items()})
    return {(source.found[name].dtype, tensors[own].dtype) for own, name in names.items()}


def _verify(path: Path, kind: Kind, how: Verification) -> None:
    if kind is Kind.CHECKPOINT:
        verify_checkpoint(path, how=how)
    elif kind in (Kind.WEIGHTS, Kind.ADAPTER) and (path / MANIFEST_NAME).exists():
        manifest.verify(path, how=how)


def _match(tensors: Mapping[str, Tensor], source: Source, prefixes: tuple[str, ...], what: str) -> dict[str, str]:
    """Return own name -> name in the source. Raise CheckpointError if the source is of another model."""
    prefix = max(prefixes, key=lambda prefix: sum(f"{prefix}{name}" in source.found for name in tensors))
    there = {
        name.removeprefix(prefix): found
        for name, found in source.found.items()
        if name.startswith(prefix) and not _COMPUTED.search(name) and not _OPTIMIZER.match(name)
    }
    names = {name: f"{prefix}{name}" for name in tensors if name in there}
    missing, surplus = sorted(tensors.keys() - there.keys()), sorted(there.keys() - tensors.keys())
    head = next((name for name in surplus if name.endswith(_HEADS)), None)
    embedding = next((name for name in tensors if name.endswith(_EMBEDDINGS)), None)
    if head is not None and embedding is not None and there[head].shape == tuple(tensors[embedding].shape):
        surplus.remove(head)
        if embedding in missing:
            missing.remove(embedding)
            names[embedding] = f"{prefix}{head}"
        elif not are_equal(source, f"{prefix}{embedding}", f"{prefix}{head}"):
            raise CheckpointError(
                f"{what} does not fit this model: {head} differs from {embedding} there, and this model has one "
                "tensor for both. Set tie_word_embeddings to false in the config.json of --model.name."
            )
    _refuse_adapter_for_weights(tensors, there, what)
    if missing or surplus:
        built = "model is built as the config.json of --model.name says."
        if adapted_matrices(tensors):
            built = "adapter is built as --model.lora.target-modules says, without peft's modules_to_save."
        raise CheckpointError(
            f"{what} does not fit this model: it lacks {some(missing)} and has besides {some(surplus)}. "
            f"Needed: {len(tensors)} tensors such as {next(iter(tensors))}, found {len(there)}. The {built}"
        )
    check_shapes(tensors, {own: source.found[name] for own, name in names.items()}, what)
    return names


def _refuse_adapter_for_weights(tensors: Mapping[str, Tensor], there: Mapping[str, Found], what: str) -> None:
    """Refuse an adapter where weights are needed, and the reverse."""
    if adapted_matrices(there) and not adapted_matrices(tensors):
        raise CheckpointError(
            f"{what} holds a LoRA adapter, and weights are needed. Train it on with --model.lora and the "
            "model that it belongs to as --model.name, or merge it: ckpt export RUN STEP --to DIR --base NAME."
        )
    if adapted_matrices(tensors) and not adapted_matrices(there):
        raise CheckpointError(
            f"{what} holds no LoRA adapter, and with model.lora nothing else is loaded. Weights to start from are "
            "given as --model.name (of a checkpoint: ckpt export RUN STEP --to DIR)."
        )


def check_shapes(tensors: Mapping[str, Tensor], there: Mapping[str, Found], what: str) -> None:
    """Raise CheckpointError, beginning with `what`, if shapes differ, or floats from other numbers."""
    wrong = [
        f"{name} is {there[name].shape} {there[name].dtype} there, {tuple(tensor.shape)} {tensor.dtype} here"
        for name, tensor in tensors.items()
        if there[name].shape != tuple(tensor.shape)
        or there[name].dtype.is_floating_point != tensor.dtype.is_floating_point
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{what} does not fit this model: {'; '.join(wrong[:3])}{more}")


def are_equal(source: Source, first: str, second: str) -> bool:
    """Whether two tensors of the source hold the same numbers. Each rank reads both as a whole."""
    if source.found[first] != source.found[second]:
        return False
    found = source.found[first]
    one, other = (torch.empty(found.shape, dtype=found.dtype) for _ in range(2))
    source.fill({first: one, second: other})
    return torch.equal(one, other)
