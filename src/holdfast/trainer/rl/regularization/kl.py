"""Divergence of the policy from its reference: estimators per token, and the penalty of rewards that they make.

Shape legend: N predicted tokens, T targets of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.batches.per_token import (
    OLD_LOGPROB,
    REFERENCE_LOGPROB,
    target_values,
)

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""No log-ratio counts for more, in either direction, as in verl and OpenRLHF: e^20 is finite in any dtype."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio within `MAX_LOG_RATIO` of 0. Outside it carries no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 = r - 1 - log r per token, r = exp(log_ratio), in nats.

    With samples from q and r = p / q its mean estimates KL(q || p), without bias and never negative
    (J. Schulman, "Approximating KL divergence", 2020). expm1 keeps the digits near r = 1.
    """
    return torch.expm1(log_ratio) - log_ratio


def estimate_kl(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) at every token sampled from the policy, in nats.

    With d = log policy - log reference: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, small variance),
    k3 = exp(-d) + d - 1 (unbiased, never negative; the ratio is reference over policy: exp(d) - d - 1 estimates
    nothing here). J. Schulman, "Approximating KL divergence", 2020. That holds for tokens of the current policy only.

    The gradient of a good estimate is not an estimate of the gradient, because the tokens, too, depend on the
    policy. As a term of the loss, on tokens of the current policy (Tang and Munos 2025, "On a few pitfalls in KL
    divergence gradient estimation for RL"):

    - k1 has a gradient of expectation zero: noise alone. Subtract it from the reward instead.
    - k2 has the gradient of KL(policy || reference), without bias.
    - k3 has the gradient of KL(reference || policy), the other direction, which is close only near the reference.

    d counts for at most 20 nats in either direction, as in verl, and has no gradient beyond. (verl also cuts k3 at 10,
    from where the reference holds a token 13 times likelier on: with such tokens k3 would be biased.)

    Args:
        logprobs_N: log-probabilities under the policy; the result is differentiable in them.
        reference_logprobs_N: those of the same tokens under the reference.
    """
    log_ratio_N = bounded(logprobs_N - reference_logprobs_N)
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    return k3(-log_ratio_N)


@dataclass(frozen=True)
class KlPenalty:
    """The KL penalty of rewards: `coef` times the estimate, subtracted at each token."""

    coef: float
    estimator: KlEstimator

    def of(self, sample: Sample) -> np.ndarray:
        """Return the penalty of each target, (T,), float64."""
        old_T = torch.from_numpy(target_values(sample, OLD_LOGPROB))
        reference_T = torch.from_numpy(target_values(sample, REFERENCE_LOGPROB))
        return self.coef * estimate_kl(old_T, reference_T, self.estimator).numpy()


def kl_of_sequences(samples: Sequence[Sample]) -> list[float]:
    """Return, for each sample, k1 against the reference before the step, summed over its targets, in nats."""
    return [
        # Not bounded, as the penalty is: the mean of bounded ones would not estimate the divergence.
        math.fsum((target_values(sample, OLD_LOGPROB) - target_values(sample, REFERENCE_LOGPROB)).tolist())
        for sample in samples
    ]
