"""Models that a run depends on and does not train: the reference of RL, and its reward model.

No checkpoint holds them, since they are the same at every step. What it holds is their digest, so that
a run never goes on against another model than the one that it began with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.models.lora import base_tensors, digest_of
from triad.errors import CheckpointError


class FrozenModel:
    """The identity of a model, as a part of a run's state. Collective to make.

    Args:
        name: directory or hub name of the model.
        key: the setting that it is from.
    """

    def __init__(self, name: str, hf_model: PreTrainedModel, *, key: str) -> None:
        self._name = name
        self._key = key
        self._digest = digest_of(base_tensors(hf_model))

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: the tensors are where they came from."""
        return {}

    def values(self) -> dict[str, Any]:
        """Return name and digest."""
        return {"name": self._name, "digest": self._digest}

    def restore(self, values: dict[str, Any]) -> None:
        """Check that the model is the one that the run began with.

        Raises:
            CheckpointError: it is another.
        """
        if values["digest"] != self._digest:
            raise CheckpointError(
                f"{self._key} = '{self._name}' holds other weights than those that the run began with "
                f"('{values['name']}'): going on would change what it trains for. Name that model, or start a new run "
                "from the weights of this one with --ckpt.weights-only."
            )


def freeze(model: nn.Module) -> None:
    """Take a model out of training, without dropout."""
    model.eval()
    model.requires_grad_(False)
