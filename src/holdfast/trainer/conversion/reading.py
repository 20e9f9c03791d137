"""Reading torch.distributed.checkpoint directories tensor by tensor, whoever wrote them with how many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from holdfast.shared.errors import CheckpointError
from holdfast.trainer.checkpoints.index import IndexReader


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
