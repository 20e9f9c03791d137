"""The engine's side of a weight transport: see `holdfast.orchestrator.weight_push` for the whole way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that were read and found to be whole and finite.

    Attributes:
        tensors: name -> tensor on the CPU, in the engine's dtype.
        digest: `holdfast.shared.files.weights_digest` of the bytes that were read.
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
