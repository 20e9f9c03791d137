"""The loss of supervised training, and the estimator of divergences. Policy losses: `holdfast.trainer.rl.losses`.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the negative log-likelihood, in nats. Denominator: all trained tokens of the step."""
    return -(weights_N * logprobs_N).sum()


def k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 = r - 1 - log r per token, r = exp(log_ratio), in nats.

    With samples from q and r = p / q its mean estimates KL(q || p), without bias and never negative
    (J. Schulman, "Approximating KL divergence", 2020). expm1 keeps the digits near r = 1.
    """
    return torch.expm1(log_ratio) - log_ratio
