"""Mean and standard deviation of all rewards of a run so far, by which rewards can be scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.trainer.checkpoints.plain_state import State


class RunningMoments(State):
    """Mean and variance over every batch seen, by the parallel update of Chan et al. 1979.

    They start as mean 0 and variance 1 with next to no weight (1e-24 observations, as in trlX's RunningMoments):
    the first batch replaces them but for rounding.

    Attributes:
        mean: mean of the rewards.
        var: their population variance.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.var = 1.0
        self.count = 1e-24

    @property
    def std(self) -> float:
        """The sample standard deviation (denominator count - 1); 1 while there are fewer than two rewards."""
        if self.count <= 1:
            return 1.0
        return math.sqrt(self.var * self.count / (self.count - 1))

    def update(self, rewards: Sequence[float]) -> None:
        """Take over the rewards of a batch: those of all ranks, since moments of parts must not be averaged.

        Sums are exact before their one rounding, so the order of the rewards does not matter.
        """
        num = len(rewards)
        if num == 0:
            return
        batch_mean = math.fsum(rewards) / num
        batch_var = math.fsum((reward - batch_mean) ** 2 for reward in rewards) / num
        difference = batch_mean - self.mean
        total = self.count + num
        self.mean += difference * num / total
        self.var = (self.var * self.count + batch_var * num + difference**2 * self.count * num / total) / total
        self.count = total

    def values(self) -> dict[str, Any]:
        """Return all that a checkpoint holds of them."""
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over what `values` returned."""
        self.mean, self.var, self.count = (float(values[name]) for name in ("mean", "var", "count"))
