"""The penalty for divergence from the reference as a term of the loss."""

from __future__ import annotations

from torch import Tensor

from trainer.policy.kl import KlCoefficient, KlEstimator, estimate_kl
from trainer.policy.losses.base import PolicyLoss, PolicyLossInput, token_weights
from triad.config.losses import PolicyLossConfig


def with_kl_term(
    loss: PolicyLoss, config: PolicyLossConfig, coefficient: KlCoefficient, estimator: KlEstimator
) -> PolicyLoss:
    """Return `loss + coef * sum_t w_t KL_t` (Shao et al. 2024, "DeepSeekMath", which has k3 there).

    The weights w, and so the denominator, are those of the loss itself.
    """

    def penalised(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        assert data.reference_logprobs_N is not None, "a KL term needs a reference"
        value, counts = loss(data)
        kl_N = estimate_kl(data.logprobs_N, data.reference_logprobs_N, estimator)
        return value + coefficient.coef * (token_weights(data, config) * kl_N).sum(), counts

    return penalised
