"""Tensors of a model in Hugging Face files: their names and layout.

transformers loads some models into other tensors than their files have: experts become one tensor per layer, names and
prefixes change (`transformers.core_model_loading`). vLLM and others expect the tensors of the original files. This
module reverts the conversions of loading, a few tensors at a time. transformers' own `revert_weight_conversion` needs
the whole model at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.hub import cached_file

from holdfast.errors import DataError
from holdfast.run.checkpoints import NAMES_NAME
from holdfast.run.weights import weights_files
from holdfast.trainer.model.safetensors_files import SINGLE_NAME
from holdfast.trainer.model.structure import base_tensors

_INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _NameIndex(msgspec.Struct):
    weight_map: dict[str, str]


def names_in_files(name: str) -> list[str] | None:
    """Return the names of the tensors in the files of a local directory or hub model; None if it has no weights.

    The `model` directory of a checkpoint has no weights. It has a list of the names if they differ from the names in
    memory. Raise DataError if its files cannot be read."""
    try:
        if (listed := Path(name) / NAMES_NAME).is_file():
            return msgspec.json.decode(listed.read_bytes(), type=list[str])
        single = fetched(name, SINGLE_NAME)
        if single is None and (index := fetched(name, _INDEX_NAME)) is not None:
            return sorted(_weight_map(index))
        files = weights_files(Path(name)) if single is None else [single]
        return sorted(set().union(*map(_names_of, files))) or None
    except (OSError, SafetensorError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"model.name = '{name}': the names of its tensors cannot be read. {error}") from error


def weight_files(name: str) -> list[Path]:
    """Return the safetensors files of a directory or hub model, or none. Raise DataError if the index is damaged."""
    if (single := fetched(name, SINGLE_NAME)) is not None:
        return [single]
    index = fetched(name, _INDEX_NAME)
    if index is None:
        return []
    try:
        files = sorted(set(_weight_map(index).values()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{index} is damaged: {error}") from None
    found = (fetched(name, file) for file in files)
    return [path for path in found if path is not None]


def _weight_map(index: Path) -> dict[str, str]:
    return msgspec.json.decode(index.read_bytes(), type=_NameIndex).weight_map


def fetched(name: str, file: str) -> Path | None:
    """Return the path of a file of a local directory or hub model; None if the file does not exist."""
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _names_of(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


@dataclass(frozen=True)
class _Rules:
    """Conversions of one direction: see transformers' `rename_source_key`."""

    renamings: list[core_model_loading.WeightRenaming]
    converters: list[core_model_loading.WeightConverter]
    is_revert: bool

    @classmethod
    def of(cls, transforms: Iterable[core_model_loading.WeightTransform], *, is_revert: bool) -> _Rules:
        listed = list(transforms)
        renamings = [one for one in listed if isinstance(one, core_model_loading.WeightRenaming)]
        converters = [one for one in listed if isinstance(one, core_model_loading.WeightConverter)]
        return cls(renamings, converters, is_revert)

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return the first new name of `name`, and the pattern of a converter that it matches, if any."""
        return core_model_loading.rename_source_key(name, self.renamings, self.converters, reverse=self.is_revert)

    def converter_of(self, pattern: str) -> core_model_loading.WeightConverter:
        """Return a copy of the last converter with `pattern`, as transformers does."""
        return deepcopy(next(one for one in reversed(self.converters) if pattern in one.source_patterns))


class TensorLayout:
    """Converts the tensors of one model between memory and files.

    Args:
        hf_model: its values do not matter; it may be on the meta device, and have adapters.
        file_names: the names of the tensors in the original files; None: the names that `save_pretrained` writes.

    Attributes:
        names: of the tensors in files.

    Raise DataError if transformers cannot revert its conversions.
    """

    def __init__(self, hf_model: PreTrainedModel, file_names: Iterable[str] | None) -> None:
        self._model = hf_model
        self._in_memory = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in base_tensors(hf_model).items()
        }
        self._prefix = f"{hf_model.base_model_prefix}."
        self._loading = _Rules.of(get_model_conversion_mapping(hf_model), is_revert=False)
        self._files_lack_prefix = False
        if file_names is None:
            # As in `revert_weight_conversion`, for a model that was never loaded.
            used = [
                one
                for one in get_model_conversion_mapping(hf_model, add_legacy=False)
                if not isinstance(one, core_model_loading.PrefixChange)
            ]
        else:
            used = self._used_by(file_names)
        self._saving = _Rules.of((one.reverse_transform() for one in reversed(used)), is_revert=True)
        self._group_of = {name: self._saving.rename(name)[0] for name in self._in_memory}
        self._sizes: dict[str, int] = {}
        for group in self._group_of.values():
            self._sizes[group] = self._sizes.get(group, 0) + 1
        written = dict(self.to_files(self._in_memory.items()))
        self.names = list(written)
        self._check(written)

    @property
    def is_plain(self) -> bool:
        """Whether files have the same tensors as memory, by the same names."""
        return set(self.names) == self._in_memory.keys() and not self._saving.converters

    def to_files(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert tensors of memory, in any order, into tensors of files; these may be views.

        Tensors that are joined or split wait until their group is whole."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            group = self._group_of[name]
            waiting.setdefault(group, {})[name] = tensor
            if len(waiting[group]) == self._sizes[group]:
                yield from self._written(waiting.pop(group))
        assert not waiting, f"tensors are missing: {waiting.keys()} are not whole"

    def name_in_files(self, name: str) -> str | None:
        """Return the name in files of a tensor in memory; None if files have no tensor of the same layout."""
        pattern = self._saving.rename(name)[1]
        if pattern is not None or self._sizes[self._group_of[name]] != 1:
            return None
        return self._without_prefix(self._group_of[name])

    def name_in_memory(self, name: str) -> str | None:
        """Return the name in memory of a tensor in files; None if memory has no tensor of the same layout."""
        found, pattern = self._loaded_name(name)
        return found if pattern is None and found in self._in_memory else None

    def sources(self, file_names: Iterable[str]) -> dict[str, list[str]]:
        """Group tensors of files by the first tensor in memory that they become, or their own name."""
        groups: dict[str, list[str]] = {}
        for name in sorted(file_names, key=core_model_loading.dot_natural_key):
            groups.setdefault(self._loaded_name(name)[0], []).append(name)
        return groups

    def from_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert whole groups of `sources` into tensors of memory."""
        return self._converted(self._loading, ((*self._loaded_name(name), name, one) for name, one in tensors.items()))

    def _used_by(self, file_names: Iterable[str]) -> list[core_model_loading.WeightTransform]:
        """Return the conversions that loading these names needs, and note whether the names lack the model's prefix."""
        transforms = get_model_conversion_mapping(self._model)
        rules = _Rules.of(transforms, is_revert=False)
        for name in file_names:
            renamed = rules.rename(name)[0]
            if renamed not in self._in_memory and self._prefix + renamed in self._in_memory:
                self._files_lack_prefix = True
        return [one for one in transforms if one.was_used()]

    def _written(self, group: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        found = self._converted(self._saving, ((*self._saving.rename(name), name, one) for name, one in group.items()))
        for name, tensor in found.items():
            yield self._without_prefix(name), tensor

    def _without_prefix(self, name: str) -> str:
        return name.removeprefix(self._prefix) if self._files_lack_prefix else name

    def _loaded_name(self, name: str) -> tuple[str, str | None]:
        """Return name in memory and pattern; see transformers' `convert_and_load_state_dict_in_model`."""
        for renamed, pattern in (self._loading.rename(name), (name, None)):
            for candidate in (renamed, renamed.removeprefix(self._prefix), self._prefix + renamed):
                if candidate in self._in_memory:
                    return candidate, pattern
        return name, None

    def _converted(self, rules: _Rules, named: Iterable[tuple[str, str | None, str, Tensor]]) -> dict[str, Tensor]:
        """Return converted tensors by their new names; `named` has group, pattern, own name and tensor of each."""
        found: dict[str, Tensor] = {}
        converters: dict[str, core_model_loading.WeightConverter] = {}
        for group, pattern, name, tensor in sorted(named, key=lambda one: core_model_loading.dot_natural_key(one[2])):
            if pattern is None:
                found[group] = tensor
                continue
            converter = converters.setdefault(group, rules.converter_of(pattern))
            converter.add_tensor(group, name, pattern, tensor)  # type: ignore[arg-type]
        for group, converter in converters.items():
            made = converter.convert(group, model=self._model, config=self._model.config)
            found |= {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
        return found

    def _check(self, written: Mapping[str, Tensor]) -> None:
        """Refuse a layout whose files could not be loaded again."""
        loaded = self.from_files(written)
        expected = {name: tensor.shape for name, tensor in self._in_memory.items()}
        if {name: tensor.shape for name, tensor in loaded.items()} != expected:
            wrong = sorted(loaded.keys() ^ expected.keys()) or sorted(
                name for name, tensor in loaded.items() if tensor.shape != expected[name]
            )
            raise DataError(
                f"{type(self._model).__name__} cannot be written in the layout of its original checkpoint: by this "
                f"version of transformers {wrong[0]} would not come back from the files ({len(wrong)} such tensors)"
            )
