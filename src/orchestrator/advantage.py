"""Group-relative advantages: how much better a rollout is than its siblings of the same problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

# Added to the standard deviation, as in verl's `compute_grpo_outcome_advantage`.
_EPSILON = 1e-6

AdvantageName = Literal["grpo", "dr_grpo"]


def sample_std(values_G: Sequence[float]) -> float:
    """Return the sample standard deviation (denominator G - 1); 0 when all values are equal."""
    if max(values_G) == min(values_G):
        return 0.0
    mean = math.fsum(values_G) / len(values_G)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values_G) / (len(values_G) - 1))


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `r_i - mean(r)` (Liu et al. 2025, "Understanding R1-Zero-Like Training", eq. 3).

    Equal rewards give exactly 0, whatever their mean rounds to.
    """
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return `(r_i - mean(r)) / (std(r) + 1e-6)` (Shao et al. 2024, "DeepSeekMath", section 4.1.2).

    The paper leaves the kind of std open; this is the sample std (G - 1), as `torch.std` gives it in
    TRL's GRPOTrainer and in verl, whose epsilon it takes too.
    """
    std = sample_std(rewards_G)
    return [centred / (std + _EPSILON) for centred in dr_grpo(rewards_G)]


ADVANTAGES: dict[AdvantageName, Callable[[Sequence[float]], list[float]]] = {"grpo": grpo, "dr_grpo": dr_grpo}
