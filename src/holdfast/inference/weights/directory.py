"""The transport by directory, the engine's side: safetensors of whole weights, or of an adapter to the engine's own."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.inference.weights.adapters import BaseWeights, read_adapter
from holdfast.inference.weights.files import Architecture, read_architecture, read_weights
from holdfast.inference.weights.transport import CheckedWeights
from holdfast.shared.files.adapter import holds_adapter


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
