"""An exponential moving average of the weights, kept beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.trainer.checkpoints.plain_state import State


class Ema(State):
    """Averages the weights of all steps: `average <- decay * average + (1 - decay) * weights`.

    The average starts as a copy of the weights (as torch.optim.swa_utils.AveragedModel does with
    `get_ema_avg_fn`). It is float32 whatever the weights are, since bfloat16 would round most updates away;
    shards of FSDP2 (DTensor) stay sharded as they are.

    Args:
        tensors: floating-point weights by name; cloned.
        decay: share of the average that an update keeps, such as 0.992.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        # copy=True: `to` returns the very weights where they are float32 already.
        self._averages = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in tensors.items()}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in the weights after a step: those of the start by the same names and sharded alike."""
        for name, average in self._averages.items():
            average.lerp_(tensors[name].detach().to(torch.float32), 1 - self.decay)
        self.num_updates += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by name, as they lie in memory; loading writes into them."""
        return dict(self._averages)

    def values(self) -> dict[str, Any]:
        """Return the number of updates; the decay is configuration."""
        return {"num_updates": self.num_updates}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `values` returned."""
        self.num_updates = int(values["num_updates"])
