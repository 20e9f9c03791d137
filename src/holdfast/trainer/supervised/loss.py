"""The loss of supervised training. Policy losses: `holdfast.trainer.rl.losses`.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the negative log-likelihood, in nats. Denominator: all trained tokens of the step."""
    return -(weights_N * logprobs_N).sum()
