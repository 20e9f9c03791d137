"""Models that a run depends on and does not train: the reference of RL, and its reward model.

No checkpoint holds them, since they are the same at every step. What it holds is their digest, so that
a run never goes on against another model than the one that it began with. A reference that follows the
policy is another at every refresh: it is in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from holdfast.shared.errors import CheckpointError, DataError
from holdfast.trainer.checkpoints.plain_state import State
from holdfast.trainer.models.lora import base_tensors, digest_of


class FrozenModel(State):
    """The identity of a model, as a part of a run's state. Collective to make.

    Args:
        name: directory or hub name of the model.
        key: the setting that it is from.
    """

    def __init__(self, name: str, hf_model: PreTrainedModel, *, key: str) -> None:
        self._name = name
        self._key = key
        self._digest = digest_of(base_tensors(hf_model))

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


class FollowingModel(State):
    """A reference that takes over the weights of the policy every so often, as a part of a run's state.

    After every `interval` steps (Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment", the
    hard update). All in float32; shards of FSDP2 stay sharded as they are.

    Args:
        name: directory or hub name of the reference that the run begins with.
        policy: the weights that it will follow, by name.

    Raises:
        DataError: policy and reference are models of other shapes.
    """

    def __init__(self, name: str, hf_model: PreTrainedModel, policy: Mapping[str, Tensor], *, interval: int) -> None:
        self._tensors = base_tensors(hf_model)
        self._interval = interval
        shapes, wanted = ({key: one.shape for key, one in of.items()} for of in (self._tensors, policy))
        if differing := sorted(key for key in shapes | wanted if shapes.get(key) != wanted.get(key)):
            raise DataError(
                f"kl.refresh_interval copies the policy into the reference, and kl.reference = '{name}' is a model of "
                f"another shape ({len(differing)} tensors differ, such as {differing[0]}): name one of the policy's "
                "own shape, or leave refresh_interval out"
            )

    @torch.no_grad()
    def after_step(self, step: int, policy: Mapping[str, Tensor]) -> None:
        """Take over the weights of the policy, if it is time. They are sharded as at the start."""
        if step % self._interval:
            return
        for name, tensor in self._tensors.items():
            tensor.copy_(policy[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the reference by name, as they lie in memory; loading writes into them."""
        return dict(self._tensors)
