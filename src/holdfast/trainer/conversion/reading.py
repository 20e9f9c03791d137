"""Reading torch.distributed.checkpoint directories tensor by tensor, whoever wrote them with how many ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.shared.errors import CheckpointError
from holdfast.trainer.checkpoints.index import IndexReader


@dataclass
class Group:
    """Tensors whose names begin alike, such as `model` or `optim`."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Difference:
    """How one tensor differs.

    Attributes:
        norm_before: its Euclidean norm; computed in float64, like all here.
        relative: norm of the difference divided by `norm_before`; None where that is no number.

    Numbers that are not finite are None: JSON has none of them.
    """

    name: str
    equal: bool
    norm_before: float | None
    norm_after: float | None
    relative: float | None


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        tensors: those that both have in the same shape, the most different first.
        only_before: names that only the first has.
        only_after: names that only the second has.
        reshaped: names whose shape or dtype differs.
    """

    tensors: list[Difference]
    only_before: list[str]
    only_after: list[str]
    reshaped: list[str]


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


def compare(before_directory: Path, after_directory: Path) -> Comparison:
    """Compare two directories tensor by tensor; two tensors are in memory at a time.

    Raises:
        CheckpointError: an index or a tensor cannot be read.
    """
    before, after = TensorReader(before_directory), TensorReader(after_directory)
    shared = sorted(before.saved.keys() & after.saved.keys())
    alike = [name for name in shared if _form(before.saved[name]) == _form(after.saved[name])]
    differences = [_difference(name, before.read(name), after.read(name)) for name in alike]
    return Comparison(
        tensors=sorted(differences, key=_rank),
        only_before=sorted(before.saved.keys() - after.saved.keys()),
        only_after=sorted(after.saved.keys() - before.saved.keys()),
        reshaped=sorted(set(shared) - set(alike)),
    )


def _form(entry: TensorStorageMetadata) -> tuple[torch.Size, torch.dtype]:
    return entry.size, entry.properties.dtype


def _difference(name: str, before: Tensor, after: Tensor) -> Difference:
    norm_before, norm_after = _norm(before), _norm(after)
    equal = _are_bit_equal(before, after)
    change = 0.0 if equal else _norm(after.double() - before.double())
    relative = 0.0 if change == 0 else change / norm_before if norm_before else math.inf
    return Difference(name, equal, _finite(norm_before), _finite(norm_after), _finite(relative))


def _are_bit_equal(before: Tensor, after: Tensor) -> bool:
    """Unlike torch.equal, NaN equals itself and 0 differs from -0."""
    flat = before.reshape(-1), after.reshape(-1)
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.reshape(-1), dtype=torch.float64))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rank(item: Difference) -> tuple[float, str]:
    """Order the most different first; a change that is no number comes before all."""
    return (-math.inf if item.relative is None else -item.relative, item.name)
